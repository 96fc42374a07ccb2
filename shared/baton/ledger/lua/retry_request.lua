-- RetryRequest: the next epoch begins, owned by a router only. Its repetition comes with the old
-- epoch, so it is looked for before the epochs are compared.
-- ARGV[5] target state, ARGV[6] router

local target, router = ARGV[5], ARGV[6]

if record.outcome then
  return conflict()
end
if record.op and record.epoch == epoch + 1 then
  return done_before(record.epoch)
end
if record.epoch ~= epoch or not may_become_target() then
  return conflict()
end
begin_writing()
for _, name in ipairs(redis.call('HKEYS', request)) do
  if string.sub(name, 1, 3) == 'op:' then
    redis.call('HDEL', request, name)
  end
end
for _, peer in ipairs({record.router, record.decode, record.prefill}) do
  if peer ~= record.gateway then
    remove_owner(peer)
  end
end
add_owner(router)
redis.call('HSET', request, 'state', target, 'epoch', epoch + 1, 'router', router, 'decode', '',
  'prefill', '', op, remember(target, record.attempts))
return done(epoch + 1, target, record.attempts)
