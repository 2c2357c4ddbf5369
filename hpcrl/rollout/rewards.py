"""Rewards of trajectories: by their domain's function, or by its settings for what the policy failed at.

load_reward      loads a domain's function with its options
RewardCaller     a loaded function: plain or async, of one trajectory or of a list
RewardScore      what a function gave a trajectory
describe_reward_error, describe_timeout  why it gave none
needs_score      whether a trajectory's function is asked
apply_score      returns a trajectory with its reward, or as a fault of the infrastructure
as_fault         returns a trajectory as a fault of the infrastructure
list_fault_outcomes  the outcomes that a domain treats as faults
mark_outage      makes a fault of an episode that failed while a judge was gone
to_reward_parts  converts what a function returned to named numbers
to_reward_list  the same for a number for each turn or token
is_infrastructure_error  whether an error of user code is never the policy's doing

A function whose first parameter is called `trajectories` takes a list and returns one reward for each, in that order.
One that has a parameter `text` (`texts`, with a list) is given the decoded tokens, and one that has `judges` the
judges of the campaign by name (`hpcrl.envs.judge_access`).
"""

import errno
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.recipe import MAX_REWARD, DomainConfig, RewardUnit
from hpcrl.config.user_code import load_code
from hpcrl.envs.base import is_quick_reward
from hpcrl.envs.judge_access import find_judges
from hpcrl.errors import EnvFault, PolicyFailure
from hpcrl.models.chat_layout import load_text_decoder
from hpcrl.rollout.judge_outages import JudgeOutages
from hpcrl.spool.outcome import OUTCOME_EXIT, OUTCOME_REWARD_ERROR, OUTCOME_SETTINGS, OUTCOME_TIMEOUT
from hpcrl.spool.record import TRAINABLE, Trajectory, TrajectoryFacts
from hpcrl.spool.rows import list_spans

MAX_REWARD_PARTS, MAX_PART_NAME_CHARS = 64, 128
JUDGED_FAILURES = frozenset({OUTCOME_TIMEOUT, OUTCOME_EXIT, OUTCOME_REWARD_ERROR})
"""The failures that an environment may have because a judge is gone."""

_POLICY_FILE_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_POLICY_ERROR_NUMBERS = frozenset({errno.ENAMETOOLONG, errno.E2BIG, errno.ELOOP, errno.EINVAL})


class RewardScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reward of a trajectory, as its function gave it."""

    parts: dict[str, float] = {}
    each: list[float] = []
    """The reward of each turn or entry of `token_ids`, if that is its domain's `reward_unit`."""
    column: bytes = b""
    """The log-probs that a teacher gave, in place of a reward: a float32 for each entry of `token_ids`."""
    error: str = ""
    """The reason why it gave no reward; empty if it did."""
    is_infrastructure: bool = False
    """True if the error is never the policy's doing."""


@dataclass(frozen=True)
class RewardCaller:
    """A domain's reward function, ready to be called."""

    function: Callable[..., Any]
    takes_list: bool
    is_async: bool
    decode: Callable[[list[int]], str] | None = None
    takes_judges: bool = False
    is_quick: bool = False
    """True if it is marked as quick (`hpcrl.envs.base.quick_reward`)."""
    unit: RewardUnit = "episode"

    def call(self, trajectories: Sequence[Trajectory]) -> Any:
        """Call the function, with one trajectory unless it takes a list; returns what it returned."""
        more: dict[str, Any] = {"judges": find_judges()} if self.takes_judges else {}
        texts = [_decode_trajectory(one, self.decode) for one in trajectories] if self.decode else None
        if self.takes_list:
            return self.function(list(trajectories), **more, **({} if texts is None else {"texts": texts}))
        (trajectory,) = trajectories
        return self.function(trajectory, **more, **({} if texts is None else {"text": texts[0]}))

    def read_scores(self, value: Any, trajectories: Sequence[Trajectory]) -> list[RewardScore]:
        """Return the score of each trajectory from what the function returned.

        A value that is not a reward is the error of its trajectory only, a wrong number of them that of each: a single
        trajectory, for which the number may be right, would only hide what the function does.
        """
        num = len(trajectories)
        if not self.takes_list:
            return [self._read_score(value, trajectories[0])]
        if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__") or len(value) != num:
            error = f"it returned {value!r:.200} for {num} trajectories: return a list, a reward for each"
            return [RewardScore(error=error)] * num
        return [self._read_score(one, trajectory) for one, trajectory in zip(value, trajectories, strict=True)]

    def _read_score(self, value: Any, trajectory: Trajectory) -> RewardScore:
        try:
            if self.unit == "episode":
                return RewardScore(parts=to_reward_parts(value))
            each = to_reward_list(value, trajectory, unit=self.unit)
        except ValueError as error:
            return RewardScore(error=str(error))
        return RewardScore(parts={"reward": math.fsum(each)}, each=each)


def load_reward(name: str, domain: DomainConfig, *, model: Path) -> RewardCaller:
    """Load a domain's reward function with its options."""
    function: Callable[..., Any] = load_code(domain.reward, what=f"domains.{name}.reward")
    parameters = list(inspect.signature(function).parameters)
    takes_list = parameters[:1] == ["trajectories"]
    return RewardCaller(
        function=functools.partial(function, **domain.reward_options),
        takes_list=takes_list,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        decode=_load_decoder(model) if ("texts" if takes_list else "text") in parameters else None,
        takes_judges="judges" in parameters,
        is_quick=is_quick_reward(function),
        unit=domain.reward_unit,
    )


def needs_score(facts: TrajectoryFacts, domain: DomainConfig) -> bool:
    """Return whether the domain's function is asked: not for a fault, nor where a setting has the reward."""
    return facts.status in TRAINABLE and not isinstance(_find_setting(domain, facts.outcome), float | int)


def apply_score(trajectory: Trajectory, domain: DomainConfig, score: RewardScore | None) -> Trajectory:
    """Return a trajectory that can be trained on with its reward; what fails is recorded in `extra`.

    The settings of its domain score what the policy failed at. An error of the function is such a failure too, unless
    the infrastructure caused it: that is never scored, and the trajectory is a fault.
    """
    if trajectory.status not in TRAINABLE:
        return trajectory
    chosen = _find_setting(domain, trajectory.outcome)
    if isinstance(chosen, float | int):
        return _with_reward(trajectory, {"reward": float(chosen)})
    assert score is not None
    if not score.error:
        return _with_reward(_with_unit_rewards(trajectory, score.each, domain.reward_unit), score.parts)
    reason = f"{domain.reward}: {score.error}"
    if score.is_infrastructure or isinstance(domain.on_reward_error, str):
        return as_fault(trajectory, reason)
    failed = msgspec.structs.replace(
        trajectory, outcome=OUTCOME_REWARD_ERROR, extra={**trajectory.extra, "reason": reason}
    )
    return _with_reward(failed, {"reward": float(domain.on_reward_error)})


def mark_outage(trajectory: Trajectory, domain: DomainConfig, *, since: float) -> Trajectory:
    """Return a fault for an episode that failed while a judge of its domain was gone; others are returned as they are.

    `since` is the time of its start, in seconds since the epoch.
    """
    outages = JudgeOutages.from_environment() if domain.judges else None
    if outages is None or trajectory.outcome not in JUDGED_FAILURES:
        return trajectory
    if not outages.have_failed_since(domain.judges, since):
        return trajectory
    reason = trajectory.extra.get("reason", trajectory.outcome)
    return as_fault(trajectory, f"{reason}; a judge failed or was gone meanwhile")


def describe_timeout(timeout_s: float, *, setting: str = "reward_timeout_s") -> RewardScore:
    """Return the score of a trajectory whose function took too long."""
    return RewardScore(error=f"it took longer than {setting} = {timeout_s:g} s: make it faster, or set more")


def describe_reward_error(error: BaseException) -> RewardScore:
    """Return the score of a trajectory whose function raised an error."""
    text = f"{type(error).__name__}: {error}"[:2000]
    return RewardScore(error=text, is_infrastructure=isinstance(error, Exception) and is_infrastructure_error(error))


def is_infrastructure_error(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, means that connections, disks or packages are missing.

    Clients of HTTP wrap the error of a connection in their own. A file that is missing, a name that is too long and a
    time limit of the function's own may be what the policy did; so may a lack of memory.
    """
    if isinstance(error, EnvFault):
        return not isinstance(error, PolicyFailure)
    if isinstance(error, ImportError) or (isinstance(error, OSError) and not _may_be_of_policy(error)):
        return True
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause is not None and is_infrastructure_error(cause)


def _may_be_of_policy(error: OSError) -> bool:
    if isinstance(error, TimeoutError):
        return error.errno is None  # with a number it is a connection's
    return isinstance(error, _POLICY_FILE_ERRORS) or error.errno in _POLICY_ERROR_NUMBERS


def list_fault_outcomes(domain: DomainConfig) -> frozenset[str]:
    """Return the outcomes of the policy's failures that a domain treats as faults."""
    return frozenset(name for name in OUTCOME_SETTINGS if _find_setting(domain, name) == "fault")


def to_reward_parts(value: Any) -> dict[str, float]:
    """Return what a reward function returned as finite numbers by name; raise ValueError if that cannot be."""
    wanted = f"a reward is a finite number, {MAX_REWARD:g} at most in size, or a dict of them by name"
    what = f"it returned {value!r:.200}: {wanted}"
    parts = value if isinstance(value, dict) else {"reward": value}
    if isinstance(value, str | bytes) or any(isinstance(part, str | bytes) for part in parts.values()):
        raise ValueError(what)
    try:
        numbers = {str(name): float(part) for name, part in parts.items()}
        total = math.fsum(numbers.values())
    except (TypeError, ValueError, OverflowError):
        raise ValueError(what) from None
    if not numbers or not all(abs(number) <= MAX_REWARD for number in (total, *numbers.values())):
        raise ValueError(what)
    if len(numbers) > MAX_REWARD_PARTS or max(map(len, numbers)) > MAX_PART_NAME_CHARS:
        raise ValueError(f"{what}, {MAX_REWARD_PARTS} at most, with names of {MAX_PART_NAME_CHARS} characters at most")
    return numbers


def to_reward_list(value: Any, trajectory: Trajectory, *, unit: RewardUnit) -> list[float]:
    """Return a reward for each turn or entry of `token_ids` as finite numbers; raise ValueError if that cannot be."""
    num = len(trajectory.turns) if unit == "turn" else len(trajectory)
    what = "turn" if unit == "turn" else "entry of token_ids"
    wanted = f'reward_unit = "{unit}" is a list of {num} numbers, one for each {what}'
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__"):
        raise ValueError(f"it returned {value!r:.200}: {wanted}")
    if len(value) != num:
        raise ValueError(f"it returned {len(value)} numbers: {wanted}")
    size = f"{MAX_REWARD:g} at most in size"
    numbers = []
    for index, one in enumerate(value):
        try:
            number = math.nan if isinstance(one, str | bytes) else float(one)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= MAX_REWARD:  # nor is NaN
            raise ValueError(f"it returned {one!r:.200} for {unit} {index}: {wanted}, each finite, {size}")
        numbers.append(number)
    if abs(math.fsum(numbers)) > MAX_REWARD:
        raise ValueError(f"it returned numbers whose sum is {math.fsum(numbers):g}: {wanted}, {size} also in sum")
    if unit == "token":
        _check_generated(numbers, trajectory)
    return numbers


def _check_generated(numbers: Sequence[float], trajectory: Trajectory) -> None:
    """Raise ValueError if a token has a reward that the model did not generate."""
    left = {index for index, number in enumerate(numbers) if number}
    for turn in trajectory.turns:
        left.difference_update(range(turn.start, turn.end))
    if left:
        index = min(left)
        raise ValueError(f"it returned {numbers[index]:g} for token {index}, which no turn generated: return 0 there")


def _with_unit_rewards(trajectory: Trajectory, each: Sequence[float], unit: RewardUnit) -> Trajectory:
    """Return a trajectory whose turns have these rewards, in place of the environment's."""
    match unit:
        case "episode":
            return trajectory
        case "turn":
            turns = [
                msgspec.structs.replace(turn, reward=reward)
                for turn, reward in zip(trajectory.turns, each, strict=True)
            ]
        case "token":
            slices = [list(each[turn.start : turn.end]) for turn in trajectory.turns]
            turns = [
                msgspec.structs.replace(turn, reward=math.fsum(own), token_rewards=own if any(own) else [])
                for turn, own in zip(trajectory.turns, slices, strict=True)
            ]
    return msgspec.structs.replace(trajectory, turns=turns)


def _find_setting(domain: DomainConfig, outcome: str) -> float | str | None:
    name = OUTCOME_SETTINGS.get(outcome)
    return None if name is None else getattr(domain, name)


def _with_reward(trajectory: Trajectory, parts: dict[str, float]) -> Trajectory:
    return msgspec.structs.replace(trajectory, reward=math.fsum(parts.values()), reward_parts=parts)


def as_fault(trajectory: Trajectory, reason: str) -> Trajectory:
    """Return a trajectory that is never trained on, for this reason."""
    return msgspec.structs.replace(trajectory, status="env-fault", extra={**trajectory.extra, "fault": reason})


def _decode_trajectory(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> str:
    """Return the text of an episode; what several conversations share comes once."""
    spans = list_spans(trajectory)
    return "\n\n".join(decode(trajectory.token_ids[span.start : span.end].tolist()) for span in spans)


@functools.cache
def _load_decoder(model: Path) -> Callable[[list[int]], str]:
    return load_text_decoder(model)
