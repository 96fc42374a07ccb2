-- AdoptRequest: the record's router changes, and its gateway if another one submits it; where there
-- is no record, or one with a lower epoch, it becomes what the caller knows.
-- ARGV[5] target state of a record that is made here, ARGV[6] router, ARGV[7] turn, ARGV[8] gateway,
-- ARGV[9] spec bytes, ARGV[10] for how many milliseconds its client may come back, ARGV[11] decode,
-- ARGV[12] prefill ("" where nobody), ARGV[13] milliseconds after which a new record goes if nobody
-- ends it
--
-- Reply: "adopted", epoch, state, attempts, failures, decode, prefill

local target, router, turn, gateway = ARGV[5], ARGV[6], tonumber(ARGV[7]), ARGV[8]
local spec, resume_ms, decode, prefill = ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local backstop_ms = ARGV[13]

if record.outcome or turn < record.turn or (turn == record.turn and router ~= record.router) then
  return conflict()
end

local function adopted()
  return {'adopted', record.epoch, record.state, record.attempts, record.failures, record.decode,
    record.prefill}
end

local behind = not record.state or record.epoch < epoch
if not behind and router == record.router and turn == record.turn then
  return adopted()
end

record.expires_at = record.expires_at or expires_in(backstop_ms)
begin_writing()
remove_owner(record.router)
remove_owner(record.gateway)
if behind then
  forget_answers()
  remove_owner(record.decode)
  remove_owner(record.prefill)
  record.epoch, record.state, record.decode, record.prefill = epoch, target, decode, prefill
  if decode ~= '' then
    record.attempts = record.attempts + 1
  end
  add_owner(decode)
  add_owner(prefill)
end
add_owner(router)
add_owner(gateway)
redis.call('HSET', request, 'state', record.state, 'epoch', record.epoch,
  'attempts', record.attempts, 'failures', record.failures, 'router', router, 'turn', turn,
  'gateway', gateway, 'decode', record.decode, 'prefill', record.prefill,
  'expires_at', record.expires_at, 'spec', spec, 'resume_ms', resume_ms)
-- Once more: a record that was made just now had nothing to expire above.
redis.call('PEXPIREAT', request, record.expires_at)
return adopted()
