"""Every setting: its name, type, default and meaning, in one frozen Struct a section.

Decides names and single values only; where values come from and whether they fit together is
``baton.runtime.config``. ``docs/configuration.md`` is rendered from these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.core.limits import Limits
from baton.core.slo import Slo

Count = Annotated[int, Meta(ge=0, le=256)]
Positive = Annotated[int, Meta(ge=1, le=256)]
Cores = tuple[Annotated[int, Meta(ge=0, le=4095)], ...]
Millis = Annotated[float, Meta(ge=0.0, le=600_000.0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections."""


class ClusterConfig(Section, frozen=True):
    """Which processes there are."""

    name: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,31}$")] = "baton"
    """Name of this cluster, for people: small letters, digits and dashes, at most 32."""
    run_dir: str = ""
    """Directory of sockets and logs, mode 0700. Empty: below `$XDG_RUNTIME_DIR` or `/tmp`."""
    mode: Literal["split", "adaptive", "colocated"] = "adaptive"
    """Who computes a prompt. `adaptive`: whoever keeps the SLOs, decided for each request; `split`:
    prefill workers; `colocated`: decode workers."""
    prefill: Count = 1
    """Prefill processes (none are started in colocated mode)."""
    decode: Positive = 1
    """Decode processes."""
    routers: Positive = 1
    """Router processes."""
    gateways: Positive = 1
    """Gateway processes; they share one listening socket."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Events below this level are not logged."""


class ModelConfig(Section, frozen=True):
    """Which model is served."""

    path: Annotated[str, Meta(min_length=1)] = "smollm2-135m-instruct"
    """A prepared model's name, a directory, or a Hugging Face name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights, activations and KV. `auto`: bfloat16 on a GPU and where the CPU computes it
    natively."""
    name: str = ""
    """Name that clients use. Empty: the model's own."""
    cache_dir: str = ""
    """Where prepared models are kept. Empty: `$XDG_CACHE_HOME/baton` or `~/.cache/baton`."""


class EngineConfig(Section, frozen=True):
    """What computes."""

    kind: Literal["torch", "fake"] = "torch"
    """`torch`: the model; `fake`: a deterministic stand-in for tests and load on the protocol."""
    kernels: Literal[
        "auto", "compiled", "torch", "amxbf16", "avx512bf16", "avx512", "avx2", "portable"
    ] = "auto"
    """`auto`: compiled ones where they are there; `compiled`: those or none; `torch`: plain torch;
    or one level of the compiled ones, for hosts with different CPUs that work together."""
    weights: Literal["auto", "full", "int8", "int4"] = "auto"
    """`full`: of the model's dtype; `int8`, `int4`: matrices are packed in 8 or 4 bits (the head in
    8), which takes a model that the compiled step knows. A token reads less memory, so decode is
    faster; how much, and what it costs in quality, stands in benchmarks/engine.md. `auto`: the
    fewest bits in which every one of the model's numbers is kept, or else `full`."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Compute threads a worker. 0: its share of the cores."""
    device: Literal["cpu", "cuda", "memfd"] = "cpu"
    """Where steps and KV blocks are. `cuda`: on the host's first GPU; not yet run on one (ADR 27).
    `memfd`: the same code on the host, for tests."""
    invariance: Literal["on", "off"] = "on"
    """Of a device. `on`: a token depends on nothing but what is before it, or the start is refused;
    `off`: faster, and a request that is recovered may go on with other tokens."""


class FakeConfig(Section, frozen=True):
    """Knobs of the fake engine; without effect on the real one."""

    prefill_ms: Millis = 0.0
    """How long one prompt chunk takes."""
    step_ms: Millis = 0.0
    """How long one decode step takes, whatever its batch."""
    write_ms: Millis = 0.0
    """Pause between two KV block writes of a prompt chunk."""
    eos_every: Annotated[int, Meta(ge=0)] = 0
    """On average every so many tokens the output ends by itself. 0: never unasked."""
    stops_dir: str = ""
    """Folder of stop point triggers (see `baton.engine.stop_points`). Empty: none. Tests only."""


class ArenaConfig(Section, frozen=True):
    """The shared memory that holds the KV blocks."""

    dir: Annotated[str, Meta(pattern="^/")] = "/dev/shm"
    """Directory of the arena files, on a memory file system."""
    size_mb: Annotated[int, Meta(ge=0)] = 0
    """MiB for each decode worker, of the device where blocks are on one. 0: what fits; a size that
    does not fit is an error at start."""
    block_size: Literal[8, 16, 32, 64] = 16
    """Tokens a block."""


class LedgerConfig(Section, frozen=True):
    """Where requests, owners and leases are recorded."""

    url: str = ""
    """`redis://`, `rediss://` or `unix://` URL. Empty: a server of the cluster's own."""
    pool: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,31}$")] = "default"
    """Name of the pool: the hash tag of all keys. Clusters that share a server need two names."""


class GatewayConfig(Section, frozen=True):
    """What clients see."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback should go with `api_keys`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """TCP port. 0: one that the kernel chooses."""
    uds: str = ""
    """Path of a Unix socket to listen on instead of `host` and `port`."""
    api_keys: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Keys that clients may use. Empty: no key is asked for."""
    root_path: Annotated[str, Meta(pattern="^(/.*[^/])?$")] = ""
    """Path prefix that a proxy in front strips or passes, such as `/llm`."""
    cors_origins: tuple[str, ...] = ()
    """Web origins allowed to call from a browser; `*` for all."""


class RouterConfig(Section, frozen=True):
    """How requests are placed."""

    local_prefill_max_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompts up to this length are computed by the decode worker itself."""
    placement: Literal["prefix", "least-loaded", "round-robin"] = "prefix"
    """Which of several decode workers a request goes to. `prefix`: where most of its prompt is
    cached, unless that one has much more to do; `least-loaded`: the one with the least to do;
    `round-robin`: each in turn. The last two are there to compare."""


class SloConfig(Section, frozen=True):
    """What clients are promised; adaptive mode decides by it."""

    ttft_ms: Annotated[int, Meta(ge=1)] = 2_000
    """The first token should come this soon."""
    itl_ms: Annotated[int, Meta(ge=1)] = 100
    """Two tokens should not be further apart."""
    overload: Literal["wait", "refuse"] = "wait"
    """`refuse`: a request whose wait alone would break `ttft_ms` is refused at once, with a time to
    come back; `wait`: it waits as long as the limits allow."""


class RolesConfig(Section, frozen=True):
    """Whether workers change between prefill and decode by themselves; `baton role` always can."""

    auto: Literal["off", "on"] = "off"
    """`on`: when one side breaks `[slo]` and the other has time to spare, a worker changes."""
    hold_s: Annotated[int, Meta(ge=1, le=3_600)] = 5
    """Seconds that this has to last before."""
    settle_s: Annotated[int, Meta(ge=1, le=3_600)] = 30
    """After a change no other one for so many seconds; the way back takes twice as long, and twice
    that each time, up to 64 times as long."""


class CoresConfig(Section, frozen=True):
    """Which process runs on which core."""

    pin: Literal["auto", "off"] = "auto"
    """`auto`: decode has cores of its own where there are two or more; `off`: no pinning."""
    prefill: Cores = ()
    """Cores of the prefill processes. Empty: chosen."""
    decode: Cores = ()
    """Cores of the decode processes. Empty: chosen."""
    rest: Cores = ()
    """Cores of routers, gateways and ledger. Empty: those of prefill."""
    lend: Literal["auto", "on", "off"] = "auto"
    """Whether a worker that computes nothing lends its cores to the other workers of its host; it
    has them back within milliseconds. `auto`: in adaptive mode. Without effect where workers are
    not pinned to cores of their own, or the step is not compiled."""


class FenceConfig(Section, frozen=True):
    """What is done about processes that stand still."""

    kill: Literal["stale", "never"] = "stale"
    """`stale`: a guard kills and replaces a worker whose event loop has stood still for longer than
    its lease; `never`: it only logs (tests, debuggers)."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, and where each came from."""

    cluster: ClusterConfig
    model: ModelConfig
    engine: EngineConfig
    fake: FakeConfig
    arena: ArenaConfig
    ledger: LedgerConfig
    gateway: GatewayConfig
    router: RouterConfig
    slo: SloConfig
    roles: RolesConfig
    cores: CoresConfig
    fence: FenceConfig
    limits: Limits
    path: Path | None
    """The file that was read, absolute; ``None``: none."""
    sources: Mapping[str, str]
    """``section.key`` -> ``default``, ``file:<path>`` or ``env:<VARIABLE>``."""

    def adaptive_slo(self) -> Slo | None:
        """Return what adaptive mode decides by; ``None`` in the other modes."""
        return self.promise() if self.cluster.mode == "adaptive" else None

    def promise(self) -> Slo:
        """Return what clients are promised, whoever decides by it."""
        slo = self.slo
        return Slo(slo.ttft_ms / 1000, slo.itl_ms / 1000, refuse=slo.overload == "refuse")


SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "cluster": ClusterConfig,
    "model": ModelConfig,
    "engine": EngineConfig,
    "fake": FakeConfig,
    "arena": ArenaConfig,
    "ledger": LedgerConfig,
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "slo": SloConfig,
    "roles": RolesConfig,
    "cores": CoresConfig,
    "fence": FenceConfig,
    "limits": Limits,
}

#: Values that ``baton config show`` and logs must not repeat.
SECRET = frozenset({"gateway.api_keys", "ledger.url"})
