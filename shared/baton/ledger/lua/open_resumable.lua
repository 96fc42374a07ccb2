-- OpenResumable: create the record, unless its idempotency key has one.
-- ARGV[2] gateway, ARGV[3] token, ARGV[4] owner, ARGV[5] requests, ARGV[6] recipe,
-- ARGV[7] window_ms, ARGV[8] life_ms, ARGV[9] repeat, ARGV[10] body, ARGV[11] anew (0 or 1)

local gateway, token, owner, requests, recipe = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local window, life, repeat_of, body, anew = ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]

if record.token then
  return given()
end
if repeat_of ~= '' and anew == '0' then
  local known = redis.call('HMGET', repeated, 'id', 'body')
  if known[1] then
    return {'repeated', known[1], known[2] == body and 1 or 0}
  end
end
record.window, record.repeat_of = tonumber(window), repeat_of
record.requests, record.recipe, record.body = requests, recipe, body
redis.call('HSET', resumable, 'turn', 0, 'gateway', gateway, 'token', token, 'owner', owner,
  'repeat', repeat_of, 'claim', '', 'former', 0, 'opened', now(), 'again', 0, 'window', window, 'life', life,
  'requests', requests, 'recipe', recipe, 'closed', '', 'answer', '', 'body', body)
redis.call('PEXPIRE', resumable, life)
if repeat_of ~= '' then
  redis.call('HSET', repeated, 'id', resumable_id, 'body', body)
  redis.call('PEXPIRE', repeated, life)
end
return given()
