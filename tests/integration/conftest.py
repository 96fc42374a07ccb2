"""What several files of integration tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.core.limits import Limits
from support.gateway_cluster import GatewayCluster, Script


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayCluster]:
    """One gateway a file, for tests that leave it as it was."""
    limits = Limits(keepalive_ms=300)
    with GatewayCluster(tmp_path_factory.mktemp("gateway"), limits=limits) as running:
        yield running


@pytest.fixture
def cluster(shared_gateway: GatewayCluster) -> GatewayCluster:
    """That gateway with its script as new. A file whose tests need another one has its own."""
    shared_gateway.script = Script()
    shared_gateway.works.clear()
    return shared_gateway
