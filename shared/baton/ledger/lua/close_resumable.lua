-- CloseResumable: every choice has its outcome.
-- ARGV[2] turn, ARGV[3] keep_ms, ARGV[4] answer, ARGV[5] "kept", "failed", "refused" or "over"

local turn, keep, answer, closed = tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]

if not record.token then
  return denied('unknown')
end
-- A complete answer is the same whoever says so; what else became of it is known to its last gateway only.
if record.closed ~= '' or turn < record.turn and closed ~= 'kept' then
  return record.turn == turn and given() or denied('claimed')
end
redis.call('PEXPIRE', resumable, keep)
redis.call('HSET', resumable, 'closed', closed, 'answer', answer)
record.closed, record.answer = closed, answer
if redis.call('HGET', repeated, 'id') == resumable_id then
  if closed ~= 'kept' and closed ~= 'failed' then
    redis.call('DEL', repeated)
  else
    redis.call('PEXPIRE', repeated, keep)
  end
end
return record.turn == turn and given() or denied('claimed')
