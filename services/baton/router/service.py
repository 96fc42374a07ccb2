"""Puts one router process together: a machine, and what its links must agree on."""

from __future__ import annotations

from baton.core.ids import Role
from baton.core.prefix import chain_root
from baton.engine.info import ModelNotPrepared
from baton.router.balance import Policy
from baton.router.machine import RouterMachine
from baton.router.placement import BlockNaming
from baton.runtime.logs import FilteringBoundLogger
from baton.runtime.model import served_model
from baton.runtime.roles import first_role
from baton.runtime.service import Context, Service, StartFailed
from baton.runtime.settings import Config


def preload(config: Config, log: FilteringBoundLogger) -> None:
    """Imports are all that a router is made of."""


def build(context: Context) -> Service:
    """Make the router service.

    Raises:
        StartFailed: the model is not prepared.
    """
    config = context.config
    try:
        model = served_model(config, context.run_dir)
    except ModelNotPrepared as error:
        raise StartFailed(str(error), permanent=True) from None
    machine = RouterMachine(
        context.me,
        config.limits,
        split=config.cluster.mode == "split",
        local_prefill_max_tokens=config.router.local_prefill_max_tokens,
        slo=config.adaptive_slo(),
        roles=_policy(config),
        naming=BlockNaming(chain_root(repr(model.compat)), model.layout.block_size),
        rule=config.router.placement,
    )
    return Service(machine=machine, compat=model.compat, model_name=model.name)


def _policy(config: Config) -> Policy | None:
    """Return when roles change by themselves, if they do."""
    decodes_as = first_role(config.cluster.mode, Role.DECODE)
    if config.roles.auto == "off" or decodes_as is None:
        return None
    return Policy(config.promise(), decodes_as, config.roles.hold_s, config.roles.settle_s)
