-- FindOrphans: name live requests that somebody without a lease works on, and nobody with one but the
-- caller and workers: those that nobody sees to, unless the caller does.
-- ARGV[5] most to name, ARGV[6] ... workers that the caller knows
--
-- Reply: "orphans", request ids ...

sweep()
local reply, count_max = {'orphans'}, tonumber(ARGV[5])
if now < rebuild_until then
  return reply
end
local sees_to_nothing = {[peer] = true}
for i = 6, #ARGV do
  sees_to_nothing[ARGV[i]] = true
end
local held, gone, seen_to, found = {}, {}, {}, {}
for _, entry in ipairs(redis.call('ZRANGE', owners, 0, -1)) do
  local owner, request = string.match(entry, '^(%S+) (.+)$')
  if owner then
    if held[owner] == nil then
      held[owner] = redis.call('ZSCORE', leases, owner) and true or false
    end
    if not held[owner] and not gone[request] then
      gone[request] = true
      found[#found + 1] = request
    elseif held[owner] and not sees_to_nothing[owner] then
      seen_to[request] = true
    end
  end
end
for _, request in ipairs(found) do
  if not seen_to[request] and #reply <= count_max then
    reply[#reply + 1] = request
  end
end
return reply
