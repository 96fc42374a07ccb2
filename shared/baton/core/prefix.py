"""Names for prefixes: chained content hashes of full blocks.

Two prefixes share a name only if their ids and everything their KV depends on are equal, so the
hash is cryptographic: a collision would be a token computed from the wrong KV. It is the same in
every process and run (nothing of Python's salted ``hash``).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

CHAIN_BYTES = 16
#: What routers remember of a name: two that are equal there cost time if they differ, no more.
SHORT_BYTES = 8


def chain_root(compat_text: str) -> bytes:
    """Return the name of the empty prefix of one (model, dtype, layout, kernel set)."""
    return blake2b(compat_text.encode(), digest_size=CHAIN_BYTES).digest()


def chain_next(previous: bytes, block_ids: bytes) -> bytes:
    """Return the name of ``previous`` followed by one block (uint32 LE ids)."""
    return blake2b(previous + block_ids, digest_size=CHAIN_BYTES).digest()


def block_names(root: bytes, ids: bytes, block_size: int) -> list[bytes]:
    """Return the name of every block of ``ids``: that of all tokens up to its last one.

    A last block that is not full has a name too, which names no full block: fewer ids go in.
    """
    names = chain_of(root, ids, block_size)
    rest = ids[len(names) * 4 * block_size :]
    if rest:
        names.append(chain_next(names[-1] if names else root, rest))
    return names


def chain_of(root: bytes, ids: bytes, block_size: int, blocks_max: int = 2**31) -> list[bytes]:
    """Return the names after each full block of ``ids`` (uint32 LE), at most ``blocks_max``."""
    width = 4 * block_size
    names: list[bytes] = []
    name = root
    for start in range(0, min(len(ids) // width, blocks_max) * width, width):
        name = chain_next(name, ids[start : start + width])
        names.append(name)
    return names


def short_names(names: Iterable[bytes]) -> bytes:
    """Return the beginnings of ``names``, as they travel to routers."""
    return b"".join(name[:SHORT_BYTES] for name in names)


def numbers_of(shorts: bytes) -> list[int]:
    """Return the numbers that stand for :func:`short_names` in this process (no other one may see
    them: their byte order is the machine's)."""
    return memoryview(shorts).cast("Q").tolist()
