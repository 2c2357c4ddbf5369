"""What is on record of evaluations: one round at a time, a part of it from each env worker, a result of all parts.

    CAMPAIGN/evaluations/
        round.json              the round that goes on, or the last one: number, job, version
        000003-part-1.json      what env worker 1 found in round 3
        000003.json             the result of round 3; only what has one counts

    is_round_due        whether another round should begin
    merge_parts         the result of a round's parts
    find_version_score  what the evaluations say of a version
    EvaluationStore     the directory

Env worker 0 begins rounds and concludes them. A round belongs to a job: what a job left without a result is not
gone on with, the next job begins another round, with the newest weights. So nothing is counted twice.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcrl.system.files import make_private_dir, publish_file

T = TypeVar("T")


class EvaluationRound(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation that was begun."""

    number: int
    job: int
    version: int
    """The newest version of the weights when it began."""


class EvaluationPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one env worker found."""

    rewards: dict[str, list[float]]
    """By domain."""
    num_tokens: int = 0
    """Of all those trajectories, said and seen."""
    num_faults: int = 0
    """Episodes that ended without a score: they say nothing about the agent."""
    oldest: int | None = None
    """Of the versions that said anything; engines take new ones while episodes run."""
    newest: int | None = None


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a round."""

    number: int
    version: int
    reward_mean: float | None
    """Over all episodes; None where not one was scored."""
    domains: dict[str, float]
    """The mean reward of each."""
    num_episodes: int
    """That were scored."""
    num_faults: int
    length_mean: float
    oldest: int | None
    newest: int | None


def is_round_due(last: EvaluationResult | None, *, newest: int, every: int) -> bool:
    """Whether a round should begin: the first at once, then one for every multiple of `every` that was passed."""
    return last is None or newest >= (last.version // every + 1) * every


def merge_parts(round: EvaluationRound, parts: Sequence[EvaluationPart]) -> EvaluationResult:
    """The result of a round of which all parts are there."""
    names = sorted({name for part in parts for name in part.rewards})
    rewards = {name: [reward for part in parts for reward in part.rewards.get(name, [])] for name in names}
    num = sum(map(len, rewards.values()))
    oldest = [part.oldest for part in parts if part.oldest is not None]
    newest = [part.newest for part in parts if part.newest is not None]
    return EvaluationResult(
        number=round.number,
        version=round.version,
        reward_mean=math.fsum(reward for found in rewards.values() for reward in found) / num if num else None,
        domains={name: math.fsum(found) / len(found) for name, found in rewards.items() if found},
        num_episodes=num,
        num_faults=sum(part.num_faults for part in parts),
        length_mean=sum(part.num_tokens for part in parts) / num if num else 0.0,
        oldest=min(oldest, default=None),
        newest=max(newest, default=None),
    )


def find_version_score(version: int, results: Sequence[EvaluationResult], *, every: int) -> float | None:
    """The mean reward of the evaluation nearest to a version, if one is nearer than `every` versions."""
    near = [result for result in results if abs(result.version - version) < every]
    return min(near, key=lambda result: abs(result.version - version)).reward_mean if near else None


class EvaluationStore:
    """The evaluations of a campaign, as they lie in its directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def current_round(self) -> EvaluationRound | None:
        """The one that goes on, or the last one."""
        return _read_json(self._directory / "round.json", EvaluationRound)

    def start_round(self, *, job: int, version: int) -> EvaluationRound:
        """Begin a round under a number that no file has, not even one left of a round without an end."""
        make_private_dir(self._directory)
        round = self.current_round()
        taken = [int(path.stem.partition("-")[0]) for path in self._directory.glob("[0-9]*.json")]
        number = max([*taken, -1 if round is None else round.number]) + 1
        started = EvaluationRound(number=number, job=job, version=version)
        publish_file(self._directory / "round.json", msgspec.json.encode(started))
        return started

    def save_part(self, part: EvaluationPart, *, round: EvaluationRound, env_index: int) -> None:
        """Put down what one env worker found; it has no other part in this round."""
        publish_file(self._part_path(round.number, env_index), msgspec.json.encode(part))

    def has_part(self, round: EvaluationRound, *, env_index: int) -> bool:
        return self._part_path(round.number, env_index).exists()

    def parts(self, round: EvaluationRound, *, num_env_workers: int) -> list[EvaluationPart] | None:
        """All parts of a round; None while one is missing."""
        found = [
            _read_json(self._part_path(round.number, env_index), EvaluationPart) for env_index in range(num_env_workers)
        ]
        parts = [part for part in found if part is not None]
        return parts if len(parts) == num_env_workers else None

    def save_result(self, result: EvaluationResult) -> None:
        publish_file(self._directory / f"{result.number:06d}.json", msgspec.json.encode(result))

    def has_result(self, round: EvaluationRound) -> bool:
        return (self._directory / f"{round.number:06d}.json").exists()

    def results(self) -> list[EvaluationResult]:
        """All that were concluded, in their order."""
        found = [_read_json(path, EvaluationResult) for path in self._result_files()]
        return [result for result in found if result is not None]

    def last_result(self) -> EvaluationResult | None:
        """The newest that was concluded."""
        paths = self._result_files()
        return _read_json(paths[-1], EvaluationResult) if paths else None

    def _result_files(self) -> list[Path]:
        paths = self._directory.glob("[0-9]*.json") if self._directory.is_dir() else ()
        return sorted(path for path in paths if path.stem.isdigit())

    def _part_path(self, number: int, env_index: int) -> Path:
        return self._directory / f"{number:06d}-part-{env_index}.json"


def _read_json(path: Path, kind: type[T]) -> T | None:
    """A file that cannot be read as what it should be is as good as none: what it said is measured again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
