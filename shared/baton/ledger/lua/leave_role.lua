-- LeaveRole: the caller gives its role up for another one, if it may.
-- KEYS[1] leases   zset  peer -> deadline
-- KEYS[2] leaving  hash  peer that left its role last, at: when
-- ARGV[1] peer of the caller, ARGV[2] hold_ms, ARGV[3] settle_ms, ARGV[4] how long the record is
-- kept, ARGV[5..] peers that do the same as the caller
--
-- Reply: "leaving", granted (0 or 1), the peer that stands against it or ""

local leases, leaving, peer = KEYS[1], KEYS[2], ARGV[1]
local hold, settle = tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function lives(who)
  local deadline = redis.call('ZSCORE', leases, who)
  return deadline and tonumber(deadline) > now
end

local record = redis.call('HMGET', leaving, 'peer', 'at')
local by, at = record[1], tonumber(record[2] or '0')
-- Who leaves its role keeps its lease until it has left it. A clock that went back says nothing.
local since = at <= now and now - at or math.huge
if by and by ~= peer and (since < settle or (since < hold and lives(by))) then
  return {'leaving', 0, by}
end
local others = #ARGV < 5
for i = 5, #ARGV do
  others = others or lives(ARGV[i])
end
if not others or not lives(peer) then
  return {'leaving', 0, ''}
end
redis.call('HSET', leaving, 'peer', peer, 'at', now)
redis.call('PEXPIRE', leaving, ARGV[4])
return {'leaving', 1, ''}
