"""The KV channel: how K and V get from prefill to decode on one host, without a copy.

``arena`` is the owner's side, ``shm`` the writer's; ``layout`` and ``checksum`` are pure and shared
with the simulator; ``locks`` proves who is alive; ``files`` and ``sizing`` serve ``arena``.
"""
