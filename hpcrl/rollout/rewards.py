"""Rewards of trajectories: by their domain's function, or by its settings for what the policy failed at.

load_reward      loads a domain's function, with its options and, if it has a parameter for it, the decoded text
score_trajectory returns a trajectory with its reward, or as a fault of the infrastructure
list_fault_outcomes  the outcomes that a domain treats as faults
to_reward_parts  converts what a function returned to named numbers
is_infrastructure_error  whether an error of user code is never the policy's doing
"""

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.recipe import DomainConfig
from hpcrl.config.user_code import load_code
from hpcrl.envs.base import RewardFunction
from hpcrl.errors import EnvFault, PolicyFailure
from hpcrl.models.chat_layout import load_text_decoder
from hpcrl.spool.outcome import OUTCOME_REWARD_ERROR, OUTCOME_SETTINGS
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.rows import list_spans

MAX_REWARD_PARTS, MAX_PART_NAME_CHARS = 64, 128


def load_reward(name: str, domain: DomainConfig, *, model: Path) -> RewardFunction:
    """Load a domain's reward function with its options; one with a parameter `text` receives the decoded tokens."""
    reward: Callable[..., float | dict[str, float]] = load_code(domain.reward, what=f"domains.{name}.reward")
    reward = functools.partial(reward, **domain.reward_options)
    if "text" not in inspect.signature(reward).parameters:
        return reward
    decode = _load_decoder(model)
    return lambda trajectory: reward(trajectory, text=_decode_trajectory(trajectory, decode))


def score_trajectory(trajectory: Trajectory, domain: DomainConfig, reward: RewardFunction) -> Trajectory:
    """Return a trajectory that can be trained on with its reward; what fails is said in `extra`.

    The settings of its domain score what the policy failed at. An error of the function is such a failure too, unless
    the infrastructure caused it: that is never scored, and the trajectory is a fault.
    """
    if trajectory.status not in TRAINABLE:
        return trajectory
    chosen = _find_setting(domain, trajectory.outcome)
    if isinstance(chosen, float | int):
        return _with_reward(trajectory, {"reward": float(chosen)})
    try:
        return _with_reward(trajectory, to_reward_parts(reward(trajectory)))
    except Exception as error:  # noqa: BLE001 - a user's reward may raise anything; one episode must not end a run
        reason = f"{domain.reward}: {type(error).__name__}: {error}"
        is_ours = is_infrastructure_error(error)
    if is_ours or isinstance(domain.on_reward_error, str):
        return _as_fault(trajectory, reason)
    failed = msgspec.structs.replace(
        trajectory, outcome=OUTCOME_REWARD_ERROR, extra={**trajectory.extra, "reason": reason}
    )
    return _with_reward(failed, {"reward": float(domain.on_reward_error)})


def is_infrastructure_error(error: Exception) -> bool:
    """Return whether an error says that files, connections, packages or memory are missing, or is an EnvFault."""
    if isinstance(error, EnvFault):
        return not isinstance(error, PolicyFailure)
    return isinstance(error, OSError | ImportError | MemoryError)


def list_fault_outcomes(domain: DomainConfig) -> frozenset[str]:
    """Return the outcomes of the policy's failures that a domain treats as faults."""
    return frozenset(name for name in OUTCOME_SETTINGS if _find_setting(domain, name) == "fault")


def to_reward_parts(value: Any) -> dict[str, float]:
    """Return what a reward function returned as finite numbers by name; raise ValueError if that cannot be."""
    what = f"it returned {value!r:.200}: a reward is a finite number, or a dict of them by name"
    parts = value if isinstance(value, dict) else {"reward": value}
    if isinstance(value, str | bytes) or any(isinstance(part, str | bytes) for part in parts.values()):
        raise ValueError(what)
    try:
        numbers = {str(name): float(part) for name, part in parts.items()}
        total = math.fsum(numbers.values())
    except (TypeError, ValueError, OverflowError):
        raise ValueError(what) from None
    if not numbers or not math.isfinite(total):
        raise ValueError(what)
    if len(numbers) > MAX_REWARD_PARTS or max(map(len, numbers)) > MAX_PART_NAME_CHARS:
        raise ValueError(f"{what}, {MAX_REWARD_PARTS} at most, with names of {MAX_PART_NAME_CHARS} characters at most")
    return numbers


def _find_setting(domain: DomainConfig, outcome: str) -> float | str | None:
    name = OUTCOME_SETTINGS.get(outcome)
    return None if name is None else getattr(domain, name)


def _with_reward(trajectory: Trajectory, parts: dict[str, float]) -> Trajectory:
    return msgspec.structs.replace(trajectory, reward=math.fsum(parts.values()), reward_parts=parts)


def _as_fault(trajectory: Trajectory, reason: str) -> Trajectory:
    return msgspec.structs.replace(trajectory, status="env-fault", extra={**trajectory.extra, "fault": reason})


def _decode_trajectory(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> str:
    """Return the text of an episode; what several conversations share comes once."""
    spans = list_spans(trajectory)
    return "\n\n".join(decode(trajectory.token_ids[span.start : span.end].tolist()) for span in spans)


@functools.cache
def _load_decoder(model: Path) -> Callable[[list[int]], str]:
    return load_text_decoder(model)
