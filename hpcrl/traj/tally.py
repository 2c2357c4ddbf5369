"""The figures of a domain, counted one trajectory at a time."""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hpcrl.spool.record import Trajectory

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantity is distributed."""

    num: int
    mean: float
    std: float
    min: float
    p10: float
    p50: float
    p90: float
    max: float


class ByVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes that began with one version."""

    version: int
    num: int
    reward_mean: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What `stats` says of a domain."""

    domain: str
    num_trajectories: int
    by_status: dict[str, int]
    num_tokens: int
    num_said_tokens: int
    reward: Spread | None
    """Of the trajectories that have one."""
    tokens: Spread | None
    turns: Spread | None
    by_lag: dict[int, int]
    """How many versions lie between the one that an episode began with and the one that ended it."""
    generate_s: float
    step_s: float
    reset_s: float
    """Sums over all trajectories."""
    by_version: list[ByVersion]


@dataclass
class Tally:
    """Takes eight bytes a trajectory for every quantity whose quantiles are told."""

    by_status: Counter[str] = field(default_factory=Counter)
    by_lag: Counter[int] = field(default_factory=Counter)
    num_said_tokens: int = 0
    rewards: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    turns: "array[float]" = field(default_factory=lambda: array("d"))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("generate", "step", "reset"), 0.0))
    versions: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> None:
        self.by_status[trajectory.status] += 1
        self.by_lag[trajectory.end_version - trajectory.start_version] += 1
        self.tokens.append(len(trajectory))
        self.turns.append(len(trajectory.turns))
        self.num_said_tokens += sum(turn.end - turn.start for turn in trajectory.turns)
        self.seconds["generate"] += sum(turn.generate_s for turn in trajectory.turns)
        self.seconds["step"] += sum(turn.step_s for turn in trajectory.turns)
        self.seconds["reset"] += trajectory.reset_s
        if trajectory.reward is not None and math.isfinite(trajectory.reward):
            self.rewards.append(trajectory.reward)
            num, total = self.versions.get(trajectory.start_version, (0, 0.0))
            self.versions[trajectory.start_version] = (num + 1, total + trajectory.reward)

    def figures(self, domain: str) -> Figures:
        return Figures(
            domain=domain,
            num_trajectories=len(self.tokens),
            by_status=dict(self.by_status.most_common()),
            num_tokens=int(sum(self.tokens)),
            num_said_tokens=self.num_said_tokens,
            reward=spread(self.rewards),
            tokens=spread(self.tokens),
            turns=spread(self.turns),
            by_lag=dict(sorted(self.by_lag.items())),
            generate_s=self.seconds["generate"],
            step_s=self.seconds["step"],
            reset_s=self.seconds["reset"],
            by_version=by_version(self.versions),
        )


def spread(values: Sequence[float]) -> Spread | None:
    """None without values."""
    if not values:
        return None
    column = np.asarray(values, np.float64)
    low, p10, p50, p90, high = (float(one) for one in np.quantile(column, QUANTILES))
    mean, std = float(column.mean()), float(column.std())
    return Spread(num=len(column), mean=mean, std=std, min=low, p10=p10, p50=p50, p90=p90, max=high)


def by_version(sums: Mapping[int, tuple[int, float]]) -> list[ByVersion]:
    return [
        ByVersion(version=version, num=num, reward_mean=total / num) for version, (num, total) in sorted(sums.items())
    ]
