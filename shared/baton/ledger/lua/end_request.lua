-- EndRequest: the one compare-and-set that makes a request terminal. Only owners end it: a router
-- that was superseded, or a worker of an attempt that is over, has no say. Where neither gateway nor
-- router holds a lease any more, whoever finds it may; so may who has a higher turn, since then the
-- record is behind (the ledger lost that it was moved).
-- KEYS[3] leases
-- ARGV[5] target state, ARGV[6] who ends it, ARGV[7] outcome bytes, ARGV[8] terminal_ttl_ms,
-- ARGV[9] turn of who ends it (0: none)

local target, by, outcome, terminal_ttl = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

if record.epoch == epoch and record.outcome == outcome and record.ended_by == by then
  return done(epoch, record.state, record.attempts)
end
local owns = by == record.router or by == record.gateway or by == record.decode
  or by == record.prefill or tonumber(ARGV[9]) > record.turn
if not owns and record.state then
  owns = not redis.call('ZSCORE', KEYS[3], record.router)
    and not redis.call('ZSCORE', KEYS[3], record.gateway)
end
if record.epoch ~= epoch or not owns or not may_become_target() then
  return conflict()
end
-- First what is allowed when memory is full (see begin_writing): an end must always be possible.
redis.call('PEXPIRE', request, terminal_ttl)
for _, peer in ipairs({record.router, record.gateway, record.decode, record.prefill}) do
  remove_owner(peer)
end
redis.call('HSET', request, 'state', target, 'outcome', outcome, 'ended_by', by)
return done(epoch, target, record.attempts)
