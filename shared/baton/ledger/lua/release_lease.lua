-- ReleaseLease: leave the registry. The seat is kept (for its TTL) while it remembers replaced
-- incarnations: they must not come back.
-- ARGV[5] incarnation

leave(peer)
if redis.call('GET', seat) == ARGV[5] then
  redis.call('DEL', seat)
end
return lost()
