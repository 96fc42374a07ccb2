"""`baton up` and `baton down`: a cluster in the background."""

from __future__ import annotations

import os

from baton.cli.client import reach
from baton.cli.cluster import Cluster, Patience
from baton.cli.record import ClusterRecord
from baton.cli.settings_file import differences
from baton.cli.status import gather, readiness
from baton.cli.terminal import CommandError, ExitCode, say, warn
from baton.runtime.settings import Config

#: `baton down --now` lets a drain go on this long.
_NOW_S = 4.0


def up(config: Config, wait_s: float) -> int:
    """Start a cluster and wait until it can serve; leave one that runs alone.

    The exit code is 1 where one runs with other settings than are said now.
    """
    cluster = Cluster(config, os.environ, say)
    found = cluster.running()
    if found is not None:
        say(
            f"already running, with the settings of its start (supervisor pid "
            f"{found.supervisor_pid}); `down` and `up` again to change them"
        )
        changed = differences(config, cluster.started_with())
        for line in changed:
            warn(f"not taken: {line}")
        say_addresses(found)
        return ExitCode.FAILED if changed else ExitCode.OK
    found = cluster.start(in_foreground=False)
    try:
        cluster.wait_ready(found, wait_s, stop=lambda: False)
    except BaseException:
        give_up(cluster)
        raise
    say_late(cluster, found)
    say_addresses(found)
    say(f"logs        {cluster.run_dir / 'logs'}")
    return ExitCode.OK


def give_up(cluster: Cluster) -> None:
    """Stop what did not become ready."""
    patience = Patience()
    patience.limit(_NOW_S)
    for line in cluster.stop(patience):
        warn(f"baton: left behind: {line}")


def say_late(cluster: Cluster, found: ClusterRecord) -> None:
    """Name the workers that do not serve yet: one of each kind is enough to be ready."""
    rows = gather(cluster, found, cluster.started_with())["processes"]
    workers = readiness(rows)
    if workers.late:
        say(f"{workers}; not yet: {', '.join(workers.late)} (see `baton status`)")


def say_addresses(found: ClusterRecord) -> None:
    """Tell where the cluster can be reached."""
    url = reach(found.url)
    if url != found.url:
        say(f"gateway     {url}")
        return
    say(f"playground  {url}/")
    say(f"API         {url}/v1 (OpenAI-compatible)")
    say(f"metrics     {url}/metrics")


def down(config: Config, *, now: bool) -> int:
    """Stop the cluster and whatever a killed one left; report what resists."""
    cluster = Cluster(config, os.environ, say)
    ran = cluster.running() is not None
    patience = Patience()
    if now:
        patience.limit(_NOW_S)
    elif ran:
        say(f"stopping ({cluster.drain_words()}; `baton down --now`: at once)")
    left = cluster.stop(patience)
    if left:
        raise CommandError("stopped, but left behind: " + "; ".join(left))
    what = "stopped" if ran else "no cluster runs here"
    say(f"{what}; nothing is left behind")
    return ExitCode.OK
