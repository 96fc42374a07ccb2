-- Shared by acquire, renew and release: placed before each of them. Opens the ledger, prolongs all
-- leases after a gap, removes expired ones.
--
-- KEYS[1] meta     hash  id, rebuild_until, swept_at
-- KEYS[2] leases   zset  peer -> deadline
-- KEYS[3] members  hash  peer -> Member bytes
-- KEYS[4] seat     string of the caller's worker_id: its incarnations, newest first
-- KEYS[5] owners   zset  "peer request" -> time when the request's record expires
-- KEYS[6] gone     zset  peer -> when its lease ended; forgotten after seat_ttl_ms
--
-- ARGV[1] peer of the caller, ARGV[2] ttl_ms, ARGV[3] a fresh random id, ARGV[4] seat_ttl_ms
--
-- Reply: "lost", id | "held", id, rebuilding (0 or 1), number of expired peers, expired peers ...,
--        Member bytes ...

local meta, leases, members, seat, owners = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local gone = KEYS[6]
local peer, ttl, fresh_id, seat_ttl = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local record = redis.call('HMGET', meta, 'id', 'rebuild_until', 'swept_at')
local id = record[1]
local rebuild_until = tonumber(record[2] or '0')
local swept_at = tonumber(record[3] or '0')

-- The first write of a script must be one that is allowed when memory is full: the rest may then
-- follow. So renewals go on when the server refuses everything that is new.
redis.call('PEXPIRE', seat, seat_ttl)

if not id then
  id = fresh_id
  rebuild_until = now + ttl
  redis.call('HSET', meta, 'id', id, 'rebuild_until', rebuild_until)
end

-- Nobody could renew while the server was away (or its clock jumped): everybody gets a full TTL.
-- A clock that went back would leave deadlines far in the future, so they are set, not only raised.
local function prolong_all()
  local held = redis.call('ZRANGE', leases, 0, -1, 'WITHSCORES')
  for i = 1, #held, 2 do
    if now < swept_at or tonumber(held[i + 1]) < now + ttl then
      redis.call('ZADD', leases, now + ttl, held[i])
    end
  end
  if now < swept_at and rebuild_until > now + ttl then
    rebuild_until = now + ttl
    redis.call('HSET', meta, 'rebuild_until', rebuild_until)
  end
end

-- Where nobody has a request there is nothing to remember.
local function leave(one)
  if redis.call('ZREM', leases, one) == 1 and redis.call('EXISTS', owners) == 1 then
    redis.call('ZADD', gone, now, one)
    redis.call('PEXPIRE', gone, seat_ttl)
  end
  redis.call('HDEL', members, one)
end

-- Removes expired leases from the registry and returns their peers. Their requests stay: routers
-- find them through `owners`. Entries of records that expired by themselves go here.
local function sweep()
  if now < swept_at or now - swept_at > ttl / 2 or id == fresh_id then
    prolong_all()
  end
  redis.call('HSET', meta, 'swept_at', now)
  redis.call('ZREMRANGEBYSCORE', owners, '-inf', now)
  redis.call('ZREMRANGEBYSCORE', gone, '-inf', now - seat_ttl)
  if now < rebuild_until then
    return {}
  end
  local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now)
  for _, each in ipairs(expired) do
    leave(each)
  end
  return expired
end

local function lost()
  return {'lost', id}
end

local function held(expired)
  local reply = {'held', id, now < rebuild_until and 1 or 0, #expired}
  for _, each in ipairs(expired) do
    reply[#reply + 1] = each
  end
  for _, member in ipairs(redis.call('HVALS', members)) do
    reply[#reply + 1] = member
  end
  return reply
end
