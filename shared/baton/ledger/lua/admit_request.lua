-- AdmitRequest: create the record at epoch 1, or return the one that is there.
-- ARGV[5] target state, ARGV[6] router, ARGV[7] gateway, ARGV[8] spec bytes,
-- ARGV[9] for how many milliseconds its client may come back, ARGV[10] milliseconds after which the
-- record goes if nobody ends it

local target, router, gateway, spec = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local resume_ms, backstop_ms = ARGV[9], ARGV[10]

if record.state then
  if record.outcome or record.router ~= router then
    return conflict()
  end
  return done(record.epoch, record.state, record.attempts)
end

record.expires_at = expires_in(backstop_ms)
redis.call('HSET', request, 'state', target, 'epoch', epoch, 'attempts', 0, 'router', router,
  'turn', 1, 'failures', 0, 'gateway', gateway, 'decode', '', 'prefill', '',
  'expires_at', record.expires_at, 'spec', spec, 'resume_ms', resume_ms)
redis.call('PEXPIREAT', request, record.expires_at)
add_owner(router)
add_owner(gateway)
return done(epoch, target, 0)
