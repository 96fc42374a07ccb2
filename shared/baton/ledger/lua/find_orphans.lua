-- FindOrphans: name live requests that somebody without a lease works on, and nobody with one but the
-- caller and workers: those that nobody sees to, unless the caller does.
-- ARGV[5] most to name, ARGV[6] what the keys of requests begin with, ARGV[7] ... workers that the
-- caller knows
--
-- Reply: "orphans", then for each its id, and for how many milliseconds from now on its client may
--        come back: of its window the time since its gateway is gone is over

sweep()
local reply, count_max, requests = {'orphans'}, tonumber(ARGV[5]), ARGV[6]
if now < rebuild_until then
  return reply
end
local function window_of(request)
  local record = redis.call('HMGET', requests .. request, 'gateway', 'resume_ms')
  local window = tonumber(record[2] or '0')
  local since = record[1] and redis.call('ZSCORE', gone, record[1])
  if not since then
    return window
  end
  return math.max(0, window - math.max(0, now - tonumber(since)))
end

local sees_to_nothing = {[peer] = true}
for i = 7, #ARGV do
  sees_to_nothing[ARGV[i]] = true
end
local held, named, seen_to, found = {}, {}, {}, {}
for _, entry in ipairs(redis.call('ZRANGE', owners, 0, -1)) do
  local owner, request = string.match(entry, '^(%S+) (.+)$')
  if owner then
    if held[owner] == nil then
      held[owner] = redis.call('ZSCORE', leases, owner) and true or false
    end
    if not held[owner] and not named[request] then
      named[request] = true
      found[#found + 1] = request
    elseif held[owner] and not sees_to_nothing[owner] then
      seen_to[request] = true
    end
  end
end
for _, request in ipairs(found) do
  if not seen_to[request] and #reply <= 2 * count_max then
    reply[#reply + 1] = request
    reply[#reply + 1] = string.format('%d', window_of(request))
  end
end
return reply
