"""The comparison with an independent client: what counts as agreement."""

from __future__ import annotations

from baton.bench.agreement import NAMES, Load, _prompts, page


def told(**changed: float) -> dict[str, float]:
    """One client's figures of one round."""
    names = ("prompt tokens", "output tokens", "requests/s", "output tokens/s", *NAMES)
    both = {"client cores": 0.02, "others cores": 0.0}
    return dict.fromkeys(names, 100.0) | both | changed


def rows(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, str]:
    load = {"streams": 2, "requests": 100, "prompt_tokens": 256, "output_tokens": 64}
    rounds = {"baton bench": ours, "vllm bench serve": theirs}
    lines = page({"load": load, "rounds": rounds}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {row[0]: row[-1] for row in cells}


def test_throughput_may_differ_by_three_percent_and_latency_by_five() -> None:
    """Medians of the rounds count: one that was disturbed does not decide."""
    theirs = [told(), told(), told()]
    near = {"requests/s": 102.9, "TTFT p99": 95.1, "ITL p50": 104.9}
    found = rows([told(**near), told(**near), told(**{"TTFT p99": 900.0})], theirs)
    assert found["requests/s"] == "3%: yes"
    assert found["TTFT p99"] == found["ITL p50"] == "5%: yes"
    assert found["TPOT p50"] == "-"
    far = {"output tokens/s": 103.1, "TTFT p50": 94.9, "ITL p99": 105.1}
    found = rows([told(**far)] * 3, theirs)
    assert found["output tokens/s"] == "3%: NO"
    assert found["TTFT p50"] == found["ITL p99"] == "5%: NO"


def test_the_other_client_is_given_what_ours_asks() -> None:
    """As many words, none asked twice, another salt other ones; one salt the same ones again."""
    wanted = Load(prompt_tokens=24, requests=50)
    asked, others = _prompts(wanted, 1), _prompts(wanted, 2)
    assert asked == _prompts(wanted, 1)
    assert len({*asked, *others}) == 100
    assert {len(each.split()) for each in asked} == {24}
