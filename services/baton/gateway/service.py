"""Puts one gateway process together: the model's text side, machine, exchange and server.

Decides what happens in which order; ``baton.runtime.shell`` lives the process around it.
"""

from __future__ import annotations

from pathlib import Path

from baton.engine.fake_model import write_fake_model
from baton.engine.info import INFO_FILE, compat_of, layout_of
from baton.gateway.exchange import Exchange
from baton.gateway.machine import GatewayMachine
from baton.gateway.server import GatewayServer, inherited_listener
from baton.gateway.serving import Serving
from baton.gateway.tokens import ModelFolderError, load_model_text
from baton.gateway.vocabulary import Deliver, End, ReportsReady
from baton.runtime.dirs import cache_dir
from baton.runtime.service import Context, Service, StartFailed
from baton.runtime.settings import Config


def build(context: Context) -> Service:
    """Make the gateway service.

    Raises:
        StartFailed: the model's folder is missing or broken.
    """
    config = context.config
    try:
        text = load_model_text(model_folder(config, context.run_dir / context.me.worker_id))
    except ModelFolderError as error:
        raise StartFailed(str(error), permanent=True) from None
    name = config.model.name or text.info.name
    machine = GatewayMachine(context.me, config.limits, config.cluster.mode)
    exchange = Exchange(context.feed, config.limits.session_buffer_bytes_max)
    servers: list[GatewayServer] = []

    async def start() -> None:
        serving = Serving(
            me=context.me,
            text=text,
            model_name=name,
            config=config.gateway,
            limits=config.limits,
            machine=machine,
            exchange=exchange,
            metrics=context.metrics,
            log=context.log,
        )
        server = GatewayServer(serving, shared=config.cluster.gateways > 1)
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

    async def stop() -> None:
        for server in servers:
            await server.close()

    layout = layout_of(text.info, config.model.dtype, config.arena.block_size)
    return Service(
        machine=machine,
        executors={
            Deliver: exchange.execute,
            End: exchange.execute,
            ReportsReady: exchange.execute,
        },
        compat=compat_of(text.info, layout, config.engine.kind),
        model_name=name,
        on_start=start,
        on_stop=stop,
        facts=lambda: {"address": servers[0].address if servers else None, "model": name},
    )


def model_folder(config: Config, scratch: Path) -> Path:
    """Return the prepared model's folder: named itself, or the newest of its name in the cache.

    Raises:
        ModelFolderError: there is none.
    """
    if config.engine.kind == "fake":
        folder = scratch.with_name(scratch.name + "-model")
        write_fake_model(folder)
        return folder
    source = config.model.path
    named = Path(source).expanduser()
    if (named / INFO_FILE).is_file():
        return named.absolute()
    models = cache_dir(config) / "models"
    slug = source.rstrip("/").rsplit("/", 1)[-1].lower()
    found = [f for f in models.glob(f"{slug}-*") if (f / INFO_FILE).is_file()]
    if not found:
        raise ModelFolderError(
            f"model {source!r} is not prepared (looked into {models}): run `baton model prepare`"
        )
    return max(found, key=lambda folder: (folder.stat().st_mtime, folder.name))
