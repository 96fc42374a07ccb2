-- AcquireLease: take the seat of a worker_id, register, hold a lease for ttl_ms.
-- ARGV[5] incarnation, ARGV[6] worker_id, ARGV[7] Member bytes, ARGV[8] how many replaced
-- incarnations a seat remembers

local incarnation, worker_id, member, seats_max = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])

local seated = {}
for each in string.gmatch(redis.call('GET', seat) or '', '%d+') do
  seated[#seated + 1] = each
end
for i = 2, #seated do
  if seated[i] == incarnation then
    -- Somebody took this name later: the caller is a process that should be gone.
    sweep()
    return lost()
  end
end

if seated[1] ~= incarnation then
  if seated[1] then
    leave(worker_id .. '/' .. seated[1])
  end
  table.insert(seated, 1, incarnation)
  while #seated > seats_max do
    table.remove(seated)
  end
  redis.call('SET', seat, table.concat(seated, ' '), 'PX', seat_ttl)
end

-- Before the sweep: the caller is here, so its old deadline no longer says anything.
redis.call('ZADD', leases, now + ttl, peer)
redis.call('HSET', members, peer, member)
redis.call('ZREM', gone, peer)
return held(sweep())
