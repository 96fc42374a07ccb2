"""GPT-2's alphabet, in which byte-level tokenizers write bytes that no text may hold.

Decides which printable letter stands for which byte; a table of the format, not ours.
"""

from __future__ import annotations


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each letter stands for, as the ByteLevel pre-tokenizer emits it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}
