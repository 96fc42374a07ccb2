-- RetryRequest: the next epoch begins, owned by a router only. Its repetition comes with the old
-- epoch, so it is looked for before the epochs are compared.
-- ARGV[5] target state, ARGV[6] router: the record's, ARGV[7] failed attempts in a row

local target, router, failures = ARGV[5], ARGV[6], ARGV[7]

if record.outcome then
  return conflict()
end
if record.op and record.epoch == epoch + 1 then
  return done_before(record.epoch)
end
if record.epoch ~= epoch or record.router ~= router or not may_become_target() then
  return conflict()
end
begin_writing()
forget_answers()
remove_owner(record.decode)
remove_owner(record.prefill)
redis.call('HSET', request, 'state', target, 'epoch', epoch + 1, 'failures', failures,
  'decode', '', 'prefill', '', op, remember(target, record.attempts))
return done(epoch + 1, target, record.attempts)
