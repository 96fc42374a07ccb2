"""Run one seed, or many, of the cluster simulation: ``python -m sim.run --seed 17 --story``."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from sim.cluster import Cluster


def run_seed(seed: int, *, story: bool = False) -> bool:
    """Run ``seed``; print its failure, and its story if asked. Return whether it passed."""
    cluster = Cluster(seed)
    try:
        cluster.run()
    except AssertionError as error:
        sys.stdout.write(f"seed {seed} FAILED: {error}\n  {cluster.scenario}\n")
        if story:
            sys.stdout.write("\n".join(cluster.story) + "\n" + traceback.format_exc())
        return False
    if story:
        sys.stdout.write("\n".join(cluster.story) + "\n")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--story", action="store_true", help="print what happened")
    options = parser.parse_args()
    began = time.monotonic()
    failed = [
        seed
        for seed in range(options.seed, options.seed + options.count)
        if not run_seed(seed, story=options.story)
    ]
    seconds = time.monotonic() - began
    sys.stdout.write(f"{options.count} seeds in {seconds:.1f} s, failed: {failed or 'none'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
