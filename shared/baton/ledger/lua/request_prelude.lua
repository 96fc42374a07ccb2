-- Shared by all transitions of a request: placed before each of them. Reads the record.
--
-- KEYS[1] request  hash  one request's record (fields: baton/ledger/keys.py)
-- KEYS[2] owners   zset  "peer request" -> time when the request's record expires
--
-- ARGV[1] request id, ARGV[2] epoch the caller knows, ARGV[3] op id, ARGV[4] states from which the
-- move is legal (" a b "), from baton.core.lifecycles, the only table of moves
--
-- Reply: "done", epoch, state, attempts | "conflict", epoch, state, outcome bytes ("" if not
--        terminal), turn | "conflict" (no such record) | "adopted", see adopt_request.lua

local request, owners = KEYS[1], KEYS[2]
local request_id, epoch, op, sources = ARGV[1], tonumber(ARGV[2]), 'op:' .. ARGV[3], ARGV[4]

local fields = redis.call('HMGET', request, 'state', 'epoch', 'attempts', 'router', 'gateway',
  'decode', 'prefill', 'expires_at', 'outcome', 'ended_by', 'turn', 'failures', op)
local record = {
  state = fields[1], epoch = tonumber(fields[2] or '0'), attempts = tonumber(fields[3] or '0'),
  router = fields[4], gateway = fields[5], decode = fields[6], prefill = fields[7],
  expires_at = fields[8], outcome = fields[9], ended_by = fields[10],
  turn = tonumber(fields[11] or '0'), failures = tonumber(fields[12] or '0'), op = fields[13],
}

local function done(at_epoch, state, attempts)
  return {'done', at_epoch, state, attempts}
end

local function conflict()
  if not record.state then
    return {'conflict'}
  end
  return {'conflict', record.epoch, record.state, record.outcome or '', record.turn}
end

-- What an op is answered with, kept to answer its repetition.
local function remember(state, attempts)
  return state .. ' ' .. attempts
end

local function done_before(at_epoch)
  local state, attempts = string.match(record.op, '^(%l+) (%d+)$')
  return done(at_epoch, state, tonumber(attempts))
end

local function may_become_target()
  return record.state and string.find(sources, ' ' .. record.state .. ' ', 1, true)
end

-- The first write of a script must be one that is allowed when memory is full: the rest may then
-- follow. So a request that was admitted can still be placed, advance and end.
local function begin_writing()
  redis.call('PEXPIREAT', request, record.expires_at)
end

-- When a record that begins now goes if nobody ends it.
local function expires_in(milliseconds)
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000) + milliseconds
end

-- The answers of an epoch that is over are nobody's any more.
local function forget_answers()
  for _, name in ipairs(redis.call('HKEYS', request)) do
    if string.sub(name, 1, 3) == 'op:' then
      redis.call('HDEL', request, name)
    end
  end
end

local function add_owner(peer)
  if peer and peer ~= '' then
    redis.call('ZADD', owners, record.expires_at, peer .. ' ' .. request_id)
  end
end

local function remove_owner(peer)
  if peer and peer ~= '' then
    redis.call('ZREM', owners, peer .. ' ' .. request_id)
  end
end
