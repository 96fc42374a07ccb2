-- AdvanceRequest: a worker says how far the request is.
-- ARGV[5] target state, ARGV[6] the worker: decode or prefill of this epoch

local target, by = ARGV[5], ARGV[6]

if record.epoch ~= epoch or record.outcome then
  return conflict()
end
if record.op then
  return done_before(epoch)
end
if (record.decode ~= by and record.prefill ~= by) or not may_become_target() then
  return conflict()
end
begin_writing()
redis.call('HSET', request, 'state', target, op, remember(target, record.attempts))
return done(epoch, target, record.attempts)
