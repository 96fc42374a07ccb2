"""What was expected of a placement, held against what came.

Decides what is learned from: first attempts only, since what delayed others is no matter of the
way they went. What is learned corrects the next estimates; errors and regret are told by metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.router.estimate import Estimate

if TYPE_CHECKING:
    from baton.router.entry import Entry
    from baton.router.placement import Place
    from baton.router.state import State


@dataclass(frozen=True, slots=True)
class Forecast:
    """Made when a request was placed for the first time."""

    chosen: Estimate
    others: tuple[Estimate, ...]
    waited_s: float
    """Before it was placed."""

    def regret_s(self, actual_s: float) -> float:
        """Return how much later the first token came than it was expected on another way."""
        best = min((way.ttft_s for way in self.others if way.ready), default=actual_s)
        return max(0.0, actual_s - best)


class Forecasts:
    """Those of one router's requests; each is in its entry."""

    def __init__(self, state: State) -> None:
        self.state = state

    def placed(self, entry: Entry, place: Place, now: float) -> None:
        """``entry`` goes to ``place``."""
        kind = "local" if place.prefill is None else "remote"
        self.state.measure("ways_total", way="reuse" if place.reuse else kind)
        entry.forecast = None
        if place.estimates and entry.epoch == 1 and entry.turn == 1:
            chosen, *others = place.estimates
            entry.forecast = Forecast(chosen, tuple(others), now - entry.arrived)

    def reserved(self, entry: Entry, found: int) -> None:
        """Decode says how many tokens it has ``found`` in its prefix cache."""
        expected, entry.expected = entry.expected, None
        if expected is None:
            return
        self.state.measure("prefix_expected_tokens_total", expected)
        self.state.measure("prefix_found_tokens_total", found)
        self.state.measure("prefix_misjudged_tokens_total", abs(expected - found))

    def ended(self, entry: Entry, ttft_ms: float | None) -> None:
        """Its gateway says when the first token came, if it did."""
        forecast, choice = entry.forecast, self.state.placement.choice
        if forecast is None or choice is None or ttft_ms is None or entry.epoch != 1:
            return
        chosen, actual_s = forecast.chosen, ttft_ms / 1000
        error = abs(actual_s - chosen.ttft_s) / max(actual_s, 0.001)
        regret_s = forecast.regret_s(actual_s)
        self.state.measure("ttft_forecast_error_ratio", error, way=chosen.kind)
        self.state.measure("ttft_regret_seconds", regret_s, way=chosen.kind)
        self.state.note(
            "forecast_held_against",
            entry,
            way=chosen.kind,
            expected_ms=round(chosen.ttft_s * 1e3, 1),
            actual_ms=round(ttft_ms, 1),
            regret_ms=round(regret_s * 1e3, 1),
        )
        choice.estimator.learn(chosen.kind, chosen.raw_s, actual_s - forecast.waited_s)
