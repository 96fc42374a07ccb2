-- RestoreResumable: a gateway makes the record again of what it serves, if the ledger has lost it.
-- ARGV[2] gateway, ARGV[3] turn, ARGV[4] again, ARGV[5] token, ARGV[6] owner, ARGV[7] requests,
-- ARGV[8] recipe, ARGV[9] window_ms, ARGV[10] life_ms, ARGV[11] repeat, ARGV[12] body

local gateway, turn, again, token = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local owner, requests, recipe, window = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local life, repeat_of, body = ARGV[10], ARGV[11], ARGV[12]

if record.token and (record.turn >= turn or record.closed ~= '') then
  return given()
end
record.turn, record.former, record.again = turn, turn, again
record.window, record.repeat_of = tonumber(window), repeat_of
record.requests, record.recipe, record.body = requests, recipe, body
-- Opened so long ago that the next turns, which grow with time, are beyond this one.
redis.call('HSET', resumable, 'turn', turn, 'gateway', gateway, 'token', token, 'owner', owner,
  'repeat', repeat_of, 'claim', '', 'former', turn, 'opened', now() - turn, 'again', again,
  'window', window, 'life', life, 'requests', requests, 'recipe', recipe, 'closed', '', 'answer', '',
  'body', body)
redis.call('PEXPIRE', resumable, life)
if repeat_of ~= '' and redis.call('EXISTS', repeated) == 0 then
  redis.call('HSET', repeated, 'id', resumable_id, 'body', body)
  redis.call('PEXPIRE', repeated, life)
end
return given()
