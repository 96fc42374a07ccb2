"""Puts one gateway process together: the model's text side, machine, exchange and server.

Decides what happens in which order; ``baton.runtime.shell`` lives the process around it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from baton.engine.info import ModelNotPrepared
from baton.gateway.exchange import Exchange
from baton.gateway.machine import GatewayMachine
from baton.gateway.server import GatewayServer, inherited_listener
from baton.gateway.serving import Serving
from baton.gateway.tokens import ModelFolderError, ModelText, load_model_text
from baton.gateway.vocabulary import (
    ClientsLeft,
    Deliver,
    End,
    LeaveClients,
    NotResumed,
    Ready,
    ReportsReady,
)
from baton.runtime.config import worker_ids
from baton.runtime.dirs import run_dir
from baton.runtime.logs import FilteringBoundLogger
from baton.runtime.model import ServedModel, served_model
from baton.runtime.service import Context, Service, StartFailed
from baton.runtime.settings import Config


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a guard loaded for its gateway."""

    model: ServedModel
    text: ModelText


def preload(config: Config, log: FilteringBoundLogger) -> Loaded | StartFailed:
    """Return the model's text side for all incarnations, or what they are to fail with."""
    try:
        model = served_model(config, run_dir(config))
        return Loaded(model, load_model_text(model.folder))
    except (ModelNotPrepared, ModelFolderError) as error:
        return StartFailed(str(error), permanent=True)


def build(context: Context) -> Service:
    """Make the gateway service.

    Raises:
        StartFailed: the model's folder is missing or broken.
    """
    config = context.config
    loaded: Loaded | StartFailed = context.preloaded
    if isinstance(loaded, StartFailed):
        raise loaded
    model, text = loaded.model, loaded.text
    name = model.name
    machine = GatewayMachine(
        context.me,
        config.limits,
        config.cluster.mode,
        others=config.cluster.gateways > 1,
        spare=context.me.worker_id not in {worker_id for _, worker_id in worker_ids(config)},
    )
    limits = config.limits
    exchange = Exchange(context.feed, limits.session_buffer_bytes_max, limits.resume_bytes_max)
    servers: list[GatewayServer] = []

    async def start() -> None:
        serving = Serving(
            me=context.me,
            compat=hashlib.sha256(msgspec.json.encode(model.compat)).hexdigest()[:32],
            text=text,
            model_name=name,
            config=config.gateway,
            limits=config.limits,
            machine=machine,
            exchange=exchange,
            metrics=context.metrics,
            log=context.log,
        )
        server = GatewayServer(serving, context.crash, shared=config.cluster.gateways > 1)
        try:
            await server.start(inherited_listener())
        except OSError as error:
            where = config.gateway.uds or f"{config.gateway.host}:{config.gateway.port}"
            raise StartFailed(
                f"cannot listen on {where}: {error.strerror}; choose another address in [gateway]",
                permanent=False,
            ) from None
        servers.append(server)
        context.log.info("listening", address=server.address)

    def leave(_: LeaveClients) -> None:
        for server in servers:
            server.leave(lambda: context.feed(ClientsLeft()))

    async def stop() -> None:
        exchange.close()
        for server in servers:
            await server.close()

    return Service(
        machine=machine,
        executors={
            **dict.fromkeys((Deliver, End, Ready, NotResumed, ReportsReady), exchange.execute),
            LeaveClients: leave,
        },
        compat=model.compat,
        model_name=name,
        on_start=start,
        on_stop=stop,
        facts=lambda: {"address": servers[0].address if servers else None, "model": name},
    )
