-- PlaceRequest: bind decode and prefill to the epoch, count the attempt.
-- ARGV[5] target state, ARGV[6] router, ARGV[7] decode, ARGV[8] prefill ("": decode prefills)

local target, router, decode, prefill = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

if record.epoch ~= epoch or record.outcome then
  return conflict()
end
if record.op then
  return done_before(epoch)
end
if record.router ~= router or not may_become_target() then
  return conflict()
end
begin_writing()
local attempts = record.attempts + 1
redis.call('HSET', request, 'state', target, 'attempts', attempts, 'decode', decode,
  'prefill', prefill, op, remember(target, attempts))
add_owner(decode)
add_owner(prefill)
return done(epoch, target, attempts)
