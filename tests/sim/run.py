"""Run one seed, or many, of the cluster simulation: ``python -m sim.run --seed 17 --story``.

With ``--resuming``, of the conversations about one resumable request.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from sim.cluster import Cluster
from sim.conversations import Conversation


def run_seed(seed: int, *, resuming: bool = False, story: bool = False) -> bool:
    """Run ``seed``; print its failure, and its story if asked. Return whether it passed."""
    run = Conversation(seed) if resuming else Cluster(seed)
    try:
        run.run()
    except AssertionError as error:
        sys.stdout.write(f"seed {seed} FAILED: {error}\n  {run.scenario}\n")
        if story:
            sys.stdout.write("\n".join(run.story) + "\n" + traceback.format_exc())
        return False
    if story:
        sys.stdout.write("\n".join(run.story) + "\n")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--story", action="store_true", help="print what happened")
    parser.add_argument("--resuming", action="store_true", help="one request at one gateway")
    options = parser.parse_args()
    began = time.monotonic()
    failed = [
        seed
        for seed in range(options.seed, options.seed + options.count)
        if not run_seed(seed, resuming=options.resuming, story=options.story)
    ]
    seconds = time.monotonic() - began
    sys.stdout.write(f"{options.count} seeds in {seconds:.1f} s, failed: {failed or 'none'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
