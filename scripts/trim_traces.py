"""Makes the trimmed traces that `baton bench` ships from the whole ones.

    python scripts/trim_traces.py FOLDER_OF_THE_WHOLE_TRACES

The first rows are kept as they are, in the sources' own columns and units; only ServeGen's length
distributions become 1,001 quantiles each. services/baton/bench/traces/README.md says how many.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "services" / "baton" / "bench" / "traces"
#: Lines kept, a CSV's header not counted.
FIRST = {
    "azure_llm_2023_code.csv.gz": 3_000,
    "azure_llm_2023_conv.csv.gz": 3_000,
    "mooncake_fast25_conversation.jsonl.gz": 1_500,
    "servegen_deepseek-r1_windows.csv.gz": 144,
}
CONVERSATIONS = 600
QUANTILES = 1_001
LICENCES = ("LICENSE-APACHE-2.0.txt", "LICENSE-CC-BY-4.0.txt")


def main(source: Path) -> int:
    """Write every trimmed file and the licences."""
    TARGET.mkdir(exist_ok=True)
    for name, count in FIRST.items():
        lines = _read(source / name).splitlines(keepends=True)
        _write(name, "".join(lines[: count + name.endswith(".csv.gz")]))
    name = "sharegpt_v3_turn_lengths.csv.gz"
    header, *lines = _read(source / name).splitlines(keepends=True)
    _write(name, header + "".join(x for x in lines if int(x.partition(",")[0]) < CONVERSATIONS))
    name = "servegen_deepseek-r1_lengths.json.gz"
    found = json.loads(_read(source / name))
    _write(name, json.dumps({key: _quantiles(shares) for key, shares in found.items()}))
    for name in LICENCES:
        (TARGET / name).write_bytes((source / name).read_bytes())
    return 0


def _quantiles(shares: dict[str, float]) -> list[int]:
    """Return the lengths at equally spaced shares of a distribution ``length -> share``."""
    lengths = sorted((int(length), share) for length, share in shares.items())
    whole, passed, quantiles = sum(shares.values()), 0.0, []
    rest = iter(lengths)
    length, share = next(rest)
    for number in range(QUANTILES):
        while passed + share < number / (QUANTILES - 1) * whole and (after := next(rest, None)):
            passed += share
            length, share = after
        quantiles.append(length)
    return quantiles


def _read(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def _write(name: str, text: str) -> None:
    # No time stamp in the file: the same rows are the same bytes.
    (TARGET / name).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
