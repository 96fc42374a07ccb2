-- Shared by open, claim, restore and close of a resumable: placed before each of them. Reads the record.
--
-- KEYS[1] resumable  hash  one client's request (fields: baton/ledger/keys.py)
-- KEYS[2] repeat     hash  its idempotency key: id, body (nobody's key if the request has none)
--
-- ARGV[1] resumable id
--
-- Reply: "resumable", turn, former, again, window_ms, repeat, requests, recipe, closed (0 or 1), answer,
--        body |
--        "repeated", resumable id, same (0 or 1) | "denied", why

local resumable, repeated, resumable_id = KEYS[1], KEYS[2], ARGV[1]

local fields = redis.call('HMGET', resumable, 'turn', 'gateway', 'token', 'owner', 'repeat', 'claim',
  'again', 'window', 'life', 'requests', 'recipe', 'closed', 'answer', 'former', 'opened', 'body')
local record = {
  turn = tonumber(fields[1] or '0'), gateway = fields[2], token = fields[3], owner = fields[4],
  repeat_of = fields[5], claim = fields[6], again = tonumber(fields[7] or '0'),
  window = tonumber(fields[8] or '0'), life = tonumber(fields[9] or '0'), requests = fields[10],
  recipe = fields[11], closed = fields[12] or '', answer = fields[13] or '',
  former = tonumber(fields[14] or '0'), opened = tonumber(fields[15] or '0'),
  body = fields[16] or '',
}

local function given()
  return {'resumable', record.turn, record.former, record.again, record.window, record.repeat_of,
    record.requests, record.recipe, record.closed ~= '' and 1 or 0, record.answer,
    record.body}
end

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function denied(why)
  return {'denied', why}
end
