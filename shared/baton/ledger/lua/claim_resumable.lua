-- ClaimResumable: another gateway (or the same one again) serves its client from now on.
-- ARGV[2] gateway, ARGV[3] claim, ARGV[4] owner, ARGV[5] token, ARGV[6] repeat ("" where the other
-- one is shown), ARGV[7] new token ("": the old one stays), ARGV[8] again (0 or 1)

local gateway, claim, owner, token = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local repeat_of, new_token, again = ARGV[6], ARGV[7], ARGV[8]

local shown = token ~= '' and token == record.token
  or repeat_of ~= '' and repeat_of == record.repeat_of
if record.claim == claim then
  shown = record.owner == owner -- repeated: it may have changed the token itself
end
if not record.token or not shown then
  return denied('unknown')
end
if record.owner ~= owner then
  return denied('foreign')
end
if record.closed == 'over' then
  return denied('over')
end
if record.claim == claim then
  return given()
end

-- What was kept is told as it is; what was closed without is made again.
local anew = record.answer == '' and (again == '1' or record.closed ~= '')
-- First what is allowed when memory is full: who was cut off then can still come back.
redis.call('PEXPIRE', resumable, redis.call('PTTL', resumable))
-- With time, so that a turn whose claim was lost is not given again.
record.former, record.turn = record.turn, math.max(record.turn + 1, now() - record.opened)
if anew then
  record.again, record.closed = record.turn, ''
  redis.call('PEXPIRE', resumable, record.life)
  if redis.call('HGET', repeated, 'id') == resumable_id then
    redis.call('PEXPIRE', repeated, record.life)
  end
end
redis.call('HSET', resumable, 'turn', record.turn, 'former', record.former, 'gateway', gateway, 'claim', claim,
  'token', new_token ~= '' and new_token or record.token, 'again', record.again,
  'closed', record.closed)
return given()
