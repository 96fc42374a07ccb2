-- FindOrphans: name live requests that somebody without a lease works on.
-- ARGV[5] most to name
--
-- Reply: "orphans", request ids ...

sweep()
local reply, count_max = {'orphans'}, tonumber(ARGV[5])
if now < rebuild_until then
  return reply
end
local held, named = {}, {}
for _, entry in ipairs(redis.call('ZRANGE', owners, 0, -1)) do
  local owner, request = string.match(entry, '^(%S+) (.+)$')
  if owner and held[owner] == nil then
    held[owner] = redis.call('ZSCORE', leases, owner) and true or false
  end
  if owner and not held[owner] and not named[request] and #reply <= count_max then
    named[request] = true
    reply[#reply + 1] = request
  end
end
return reply
