-- FindOwned: name live requests whose record names the caller.
-- KEYS[1] owners   zset  "peer request" -> time when the request's record expires
-- ARGV[1] peer of the caller, ARGV[2] most to name
--
-- Reply: "owned", request ids ...

local reply, prefix, count_max = {'owned'}, ARGV[1] .. ' ', tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')) do
  if string.sub(entry, 1, #prefix) == prefix and #reply <= count_max then
    reply[#reply + 1] = string.sub(entry, #prefix + 1)
  end
end
return reply
