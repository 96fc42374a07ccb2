"""The benchmark of an engine on a device, on a tiny model and the host in the device's place."""

from __future__ import annotations

from typing import Any

import pytest

from baton.bench import device
from support.engine_device import device_engine


def test_it_measures_prompts_steps_and_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of the page is there, of lengths that the model has."""
    monkeypatch.setattr(device, "PROMPTS", (40, 5_000))
    monkeypatch.setattr(device, "CONTEXTS", (30, 5_000))
    monkeypatch.setattr(device, "STREAMS", (1, 3, 10**6))
    engine: Any = device_engine(rows=0)
    speed = device._Speed(engine, "memfd")
    found = speed.all(repeats=1, steps=2)
    speed.close()
    assert list(found["prefill"]) == ["40"]
    assert list(found["decode"]) == ["1 x 30", "3 x 30"]
    assert all(at["tokens_s"] > 0 for at in found["decode"].values())
    assert found["checksum_gb_s"] > 0
    result = {"model": "m", "dtype": "float32", "speed": {"k": found | {"device": "this"}}}
    text = device.page(result)
    assert "m in float32 on this" in text and "3 x 30" in text
