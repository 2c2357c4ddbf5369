"""Evaluations on disk: one round at a time, a part of it from each env worker, a result of all parts.

    CAMPAIGN/evaluations/
        round.json              the current round, or the last one: number, job, version
        000003-part-1.json      the part of env worker 1 in round 3
        000003.json             the result of round 3; only rounds with a result count

    EvaluationStore     the directory
    EvaluationRound     the contents of round.json
    EvaluationPart      the results of one env worker
    EvaluationResult    the result of a round
    is_round_due        whether another round should start
    merge_parts         the result of a round's parts
    find_version_score  the mean reward of the evaluation nearest to a version

Env worker 0 starts and concludes rounds. A round belongs to a job: a round that a job left without a result is not
continued; the next job starts another one with the newest weights. So nothing is counted twice.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcrl.system.files import make_private_dir, publish_file

T = TypeVar("T")


class EvaluationRound(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation that was started."""

    number: int
    job: int
    version: int
    """The newest version of the weights at its start."""


class EvaluationPart(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one env worker."""

    rewards: dict[str, list[float]]
    """The rewards of each domain."""
    num_tokens: int = 0
    """The tokens of all these trajectories, generated and observed."""
    num_faults: int = 0
    """The episodes that ended without a score, each after several attempts: they do not measure the agent."""
    outcomes: dict[str, dict[str, int]] = {}
    """All episodes that were started, by domain and outcome (hpcrl.spool.outcome)."""
    oldest: int | None = None
    """The oldest version that generated a token; engines load new ones while episodes run."""
    newest: int | None = None


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a round."""

    number: int
    version: int
    reward_mean: float | None
    """The mean over all episodes; None if not one was scored."""
    domains: dict[str, float]
    """The mean reward of each."""
    num_episodes: int
    """The number of scored episodes."""
    num_faults: int
    length_mean: float
    oldest: int | None
    newest: int | None
    outcomes: dict[str, dict[str, int]] = {}


def is_round_due(last: EvaluationResult | None, *, newest: int, every: int) -> bool:
    """Return whether a round should start: the first at once, then one per multiple of `every` that was passed."""
    return last is None or newest >= (last.version // every + 1) * every


def merge_parts(round: EvaluationRound, parts: Sequence[EvaluationPart]) -> EvaluationResult:
    """Merge all parts of a round into its result."""
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
        outcomes=_sum_outcomes(parts),
    )


def _sum_outcomes(parts: Sequence[EvaluationPart]) -> dict[str, dict[str, int]]:
    summed: dict[str, Counter[str]] = {}
    for part in parts:
        for name, counts in part.outcomes.items():
            summed.setdefault(name, Counter()).update(counts)
    return {name: dict(summed[name]) for name in sorted(summed)}


def find_version_score(version: int, results: Sequence[EvaluationResult], *, every: int) -> float | None:
    """Return the mean reward of the evaluation nearest to a version, if one is nearer than `every` versions."""
    near = [result for result in results if abs(result.version - version) < every]
    return min(near, key=lambda result: abs(result.version - version)).reward_mean if near else None


class EvaluationStore:
    """The evaluations of a campaign, in its directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def current_round(self) -> EvaluationRound | None:
        """Return the current round, or the last one."""
        return _read_json(self._directory / "round.json", EvaluationRound)

    def start_round(self, *, job: int, version: int) -> EvaluationRound:
        """Start a round under a number that no file has, not even one left by an unfinished round."""
        make_private_dir(self._directory)
        round = self.current_round()
        taken = [int(path.stem.partition("-")[0]) for path in self._directory.glob("[0-9]*.json")]
        number = max([*taken, -1 if round is None else round.number]) + 1
        started = EvaluationRound(number=number, job=job, version=version)
        publish_file(self._directory / "round.json", msgspec.json.encode(started))
        return started

    def save_part(self, part: EvaluationPart, *, round: EvaluationRound, env_index: int) -> None:
        """Store the results of one env worker; it has no other part in this round."""
        publish_file(self._part_path(round.number, env_index), msgspec.json.encode(part))

    def has_part(self, round: EvaluationRound, *, env_index: int) -> bool:
        return self._part_path(round.number, env_index).exists()

    def parts(self, round: EvaluationRound, *, num_env_workers: int) -> list[EvaluationPart] | None:
        """Return all parts of a round; None while one is missing."""
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
        """Return all results in order."""
        found = [_read_json(path, EvaluationResult) for path in self._result_files()]
        return [result for result in found if result is not None]

    def last_result(self) -> EvaluationResult | None:
        """Return the newest result."""
        paths = self._result_files()
        return _read_json(paths[-1], EvaluationResult) if paths else None

    def _result_files(self) -> list[Path]:
        paths = self._directory.glob("[0-9]*.json") if self._directory.is_dir() else ()
        return sorted(path for path in paths if path.stem.isdigit())

    def _part_path(self, number: int, env_index: int) -> Path:
        return self._directory / f"{number:06d}-part-{env_index}.json"


def _read_json(path: Path, kind: type[T]) -> T | None:
    """Read a file; None if it is missing or malformed: its content is then measured again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
