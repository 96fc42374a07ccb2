"""Names of prefixes: content alone decides them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.core.prefix import block_names, chain_of, chain_root, numbers_of, short_names
from support.engine_steps import child_env

IDS = bytes(range(160))
PROGRAM = (
    "from baton.core.prefix import block_names, chain_root;"
    "print(b''.join(block_names(chain_root('model'), bytes(range(160)), 16)).hex())"
)


@pytest.mark.parametrize("seed", ["1", "2", "random"])
def test_names_are_the_same_in_every_process(seed: str) -> None:
    """(28) Nothing of the language's salted hash goes in."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=child_env() | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.strip() == b"".join(block_names(chain_root("model"), IDS, 16)).hex()


def test_a_name_is_that_of_everything_before() -> None:
    """Other ids, another place, another model or a shorter last block: another name."""
    root = chain_root("model")
    names = block_names(root, IDS, 16)
    assert len(names) == len(set(names)) == 3
    assert chain_of(root, IDS, 16) == names[:2]
    assert block_names(chain_root("other"), IDS, 16)[0] != names[0]
    changed = b"\xff" + IDS[1:]
    assert not set(block_names(root, changed, 16)) & set(names)
    assert block_names(root, IDS[:-4], 16)[:2] == names[:2]
    assert block_names(root, IDS[:-4], 16)[2] != names[2]


def test_a_short_name_is_one_number_here_and_there() -> None:
    """What a decode worker tells is what a router makes of the same ids."""
    names = chain_of(chain_root("model"), IDS, 4)
    numbers = numbers_of(short_names(names))
    assert len(set(numbers)) == len(names) == len(numbers)
    assert [number.to_bytes(8, sys.byteorder) for number in numbers] == [n[:8] for n in names]
