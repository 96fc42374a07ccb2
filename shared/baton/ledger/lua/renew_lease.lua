-- RenewLease: prolong the caller's lease by ttl_ms from now, then sweep.

-- A lease that ran out but was not swept yet is still the caller's.
if not redis.call('ZSCORE', leases, peer) then
  sweep()
  return lost()
end
redis.call('ZADD', leases, 'XX', now + ttl, peer)
return held(sweep())
