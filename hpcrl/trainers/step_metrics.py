"""The metrics of a training step, from its trajectories and from the results of learning."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcrl.learn.advantage import group_indices, is_flat
from hpcrl.learn.distribute import StepShares
from hpcrl.learn.loss import LossSums, compute_ratio_quantiles
from hpcrl.spool.record import Trajectory
from hpcrl.system.json_numbers import finite_or_none
from hpcrl.trainers.base import StepMetrics


class Stopwatch:
    """The time of a step by its stages: `record_lap` names the stage since the lap before."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def record_lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 6)
        self._last = now


@dataclass
class LearnResult:
    """The results of a training step's optimizer steps, over all ranks."""

    sums: LossSums
    first_sums: LossSums | None = None
    """The sums of the first optimizer step alone, which are of the weights before any change."""
    skipped: str | None = None
    num_tokens: int = 0
    num_summed: float = 0.0
    """The tokens that the sums are over: each epoch counts."""
    num_padded_tokens: int = 0
    largest_batch: int = 0
    """The tokens of the largest micro-batch of any rank, padding included."""
    learning_rate: float = 0.0
    is_replayed: bool = False
    """True where routers replay the engine's choice of experts."""
    norms: list[float] = field(default_factory=list)
    value_losses: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self.norms)

    def add(self, sums: LossSums, *, norm: float, num_tokens: float) -> None:
        """Add the result of one optimizer step; `skipped` is set if it is not finite and must not be applied."""
        self.first_sums = self.first_sums or sums
        self.sums = self.sums.add(sums)
        self.num_summed += num_tokens
        self.norms.append(norm)
        loss = sums.loss.item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped = f"loss {loss} with gradient norm {norm} is not finite"

    def metric_fields(self) -> dict[str, Any]:
        """Return the fields of StepMetrics that come from learning."""
        tokens = self.num_summed or math.nan
        first = self.first_sums or self.sums
        low, middle, high = compute_ratio_quantiles(self.sums.ratio_bins.cpu(), (0.05, 0.5, 0.95))
        return {
            "skipped": self.skipped,
            "num_tokens": self.num_tokens,
            "num_padded_tokens": self.num_padded_tokens,
            "loss": finite_or_none(self.sums.loss.item() / self.num_steps) if self.norms else None,
            "grad_norm": finite_or_none(sum(self.norms) / len(self.norms)) if self.norms else None,
            "value_loss": finite_or_none(sum(self.value_losses) / len(self.value_losses))
            if self.value_losses
            else None,
            "learning_rate": self.learning_rate,
            "clip_fraction": finite_or_none(self.sums.clipped.item() / tokens),
            "is_ratio_mean": finite_or_none(self.sums.is_ratio.item() / tokens),
            "is_ratio_p05": low,
            "is_ratio_p50": middle,
            "is_ratio_p95": high,
            "is_truncated_fraction": finite_or_none(self.sums.truncated.item() / tokens),
            "kl": finite_or_none(self.sums.kl.item() / tokens),
            "kl_fresh": finite_or_none(first.kl_fresh.item() / (first.num_fresh.item() or math.nan)),
            "kl_reference": finite_or_none(self.sums.kl_reference.item() / tokens),
            "entropy": finite_or_none(self.sums.entropy.item() / tokens),
            "replayed_fraction": finite_or_none(self.sums.num_replayed.item() / tokens) if self.is_replayed else None,
        }


def build_step_metrics(
    trajectories: Sequence[Trajectory],
    *,
    step_shares: StepShares,
    learn_result: LearnResult,
    step: int,
    version: int,
    stopwatch: Stopwatch,
) -> StepMetrics:
    """Build the metrics of a training step."""
    step_s = sum(stopwatch.seconds.values())
    return StepMetrics(
        step=step,
        version=version,
        num_too_long=step_shares.num_too_long,
        imbalance=step_shares.imbalance,
        **_summarize_trajectories(trajectories, version=version),
        **learn_result.metric_fields(),
        tokens_per_s=round(learn_result.num_tokens / step_s, 1) if step_s > 0 else 0.0,
        step_s=round(step_s, 6),
        times=stopwatch.seconds,
        num_rows=sum(len(items) for share in step_shares.shares for items in share),
        too_long_tokens=step_shares.too_long_tokens,
    )


def compute_flops_utilization(metrics: StepMetrics, *, num_params: int, peak_flops: float) -> float | None:
    """Return the MFU: the FLOPs of a step (6 per weight and token) over those the GPUs could do; None without GPUs."""
    if not peak_flops or not metrics.step_s:
        return None
    return round(6 * num_params * metrics.num_padded_tokens / (metrics.step_s * peak_flops), 4)


def _summarize_trajectories(trajectories: Sequence[Trajectory], *, version: int) -> dict[str, Any]:
    """Return the fields of StepMetrics that come from the trajectories."""
    rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
    members = group_indices([trajectory.group for trajectory in trajectories]).values()
    lags = [version - trajectory.start_version for trajectory in trajectories]
    return {
        "num_trajectories": len(trajectories),
        "num_groups": len(members),
        "num_flat_groups": sum(is_flat(rewards[indices]) for indices in members),
        "reward_mean": finite_or_none(rewards.mean()) if lags else None,
        "reward_std": finite_or_none(rewards.std()) if lags else None,
        "length_mean": sum(map(len, trajectories)) / max(len(trajectories), 1),
        "length_max": max(map(len, trajectories), default=0),
        "lag_mean": sum(lags) / max(len(lags), 1),
        "lag_max": max(lags, default=0),
        "lags": {str(lag): lags.count(lag) for lag in sorted(set(lags))},
    }
