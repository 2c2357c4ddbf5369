"""What of the events is a figure, and under which name and step it is shown. Pure.

figures_of   an event -> its figures, or None
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

GROUPS = {
    "reward": ("reward_mean", "reward_std", "num_trajectories", "num_groups", "num_flat_groups", "num_too_long"),
    "length": ("length_mean", "length_max", "num_tokens", "num_padded_tokens"),
    "policy": ("loss", "value_loss", "kl", "kl_reference", "entropy", "clip_fraction", "grad_norm", "learning_rate"),
    "is_ratio": ("is_ratio_mean", "is_ratio_p05", "is_ratio_p50", "is_ratio_p95", "is_truncated_fraction"),
    "staleness": ("lag_mean", "lag_max"),
    "speed": ("tokens_per_s", "mfu", "step_s", "wait_s", "imbalance"),
}
"""The fields of a step by the heading under which they are shown."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of one event."""

    time: float
    step: int
    """Of training; for an evaluation, the version of the weights."""
    values: dict[str, float]


def figures_of(event: Mapping[str, Any]) -> Figures | None:
    """The figures of a training step or an evaluation."""
    match event.get("event"):
        case "step":
            return _shown(event, step=event["step"], values=_of_step(event))
        case "evaluation":
            return _shown(event, step=event["version"], values=_of_evaluation(event))
    return None


def _shown(event: Mapping[str, Any], *, step: int, values: Iterator[tuple[str, Any]]) -> Figures:
    numbers = {name: float(value) for name, value in values if isinstance(value, int | float) and math.isfinite(value)}
    return Figures(time=float(event["time"]), step=step, values=numbers)


def _of_step(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for group, names in GROUPS.items():
        yield from ((f"{group}/{name}", event.get(name)) for name in names)
    yield from ((f"staleness/lag_{lag}", num) for lag, num in event.get("lags", {}).items())
    yield from ((f"time/{name}_s", seconds) for name, seconds in event.get("times", {}).items())


def _of_evaluation(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("reward_mean", "length_mean", "num_episodes", "num_faults"):
        yield f"evaluation/{name}", event.get(name)
    yield from ((f"evaluation/reward_mean/{name}", reward) for name, reward in event.get("domains", {}).items())
