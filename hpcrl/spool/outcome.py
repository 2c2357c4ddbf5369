"""The outcomes of episodes: one table of how an episode can end, who caused it, and what it leads to. Pure.

    OUTCOMES                   the table: every outcome by name
    OutcomeFacts               an entry of it
    OUTCOME_SETTINGS           the outcomes whose reward a domain sets, with the name of the setting
    name_outcome               the outcome of an episode by its record
    measure_outcomes           the share of each outcome among the episodes that ended
    is_infrastructure          whether infrastructure caused an outcome
    is_failure, count_failures, measure_failures, format_failed    the one definition of a failed episode
    is_too_old                 whether an episode is too many versions behind to be trained on
    FAILURES, LOST, ABORTED    the outcomes of failed, lost and aborted episodes

What the policy causes is an outcome with a reward, so that training and evaluations count it; infrastructure that
fails is retried, and never scored.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

from hpcrl.spool.status import EpisodeStatus

Num = TypeVar("Num", int, float)
Cause = Literal["policy", "environment", "infrastructure", "training"]
OUTCOME_TIMEOUT, OUTCOME_EXIT, OUTCOME_REWARD_ERROR = "timeout", "exit", "reward-error"
OUTCOME_MAX_TURNS, OUTCOME_OVERFLOW, OUTCOME_UNPLAYED = "max-turns", "overflow", "unplayed"
OUTCOME_FINISHED = "finished"
LOST = ("env-fault", "policy-fault")
ABORTED = ("aborted-stale", "aborted-redundant")
FAILURES = (OUTCOME_TIMEOUT, OUTCOME_EXIT, OUTCOME_REWARD_ERROR, *LOST)
"""The outcomes that are counted as failed."""
MAX_FAILED_SHARE = 0.5
"""The share of failures beyond which people are warned: the program itself may be broken."""


class OutcomeFacts(NamedTuple):
    """One way in which an episode ends."""

    cause: Cause
    text: str
    setting: str = ""
    """The setting of its domain with the reward, or with "fault"; "": none."""


OUTCOMES: dict[str, OutcomeFacts] = {
    OUTCOME_FINISHED: OutcomeFacts("environment", "it ended by itself"),
    OUTCOME_MAX_TURNS: OutcomeFacts("policy", "it used up max_turns", "on_max_turns"),
    OUTCOME_OVERFLOW: OutcomeFacts("policy", "its conversation filled the context", "on_overflow"),
    OUTCOME_TIMEOUT: OutcomeFacts("policy", "a step, the program or the episode took too long", "on_timeout"),
    OUTCOME_EXIT: OutcomeFacts("policy", "the program failed, or reported no reward", "on_exit"),
    OUTCOME_REWARD_ERROR: OutcomeFacts("policy", "its reward could not be computed", "on_reward_error"),
    "truncated": OutcomeFacts("policy", "a limit cut it off; its record does not name the limit"),
    OUTCOME_UNPLAYED: OutcomeFacts("environment", "the environment ended it before the model's first turn"),
    "aborted-stale": OutcomeFacts("training", "it was too old to train on"),
    "aborted-redundant": OutcomeFacts("training", "its group did not need it"),
    "env-fault": OutcomeFacts("infrastructure", "its environment failed, also when it was tried again"),
    "policy-fault": OutcomeFacts("infrastructure", "no engine generated its turn"),
}
OUTCOME_SETTINGS: dict[str, str] = {name: facts.setting for name, facts in OUTCOMES.items() if facts.setting}


def name_outcome(status: EpisodeStatus, outcome: str) -> str:
    """Return the outcome of an episode that has this status and names this outcome in its record, if any."""
    if status in ("done", "truncated") or outcome == OUTCOME_UNPLAYED:
        return outcome or (OUTCOME_FINISHED if status == "done" else status)
    return status


def measure_outcomes(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each outcome among the ended episodes that training did not abort, the largest first."""
    counted = {
        name: num for name, num in counts.items() if num > 0 and (name not in OUTCOMES or _is_counted(OUTCOMES[name]))
    }
    total = sum(counted.values())
    return {name: num / total for name, num in sorted(counted.items(), key=lambda item: (-item[1], item[0]))}


def is_infrastructure(outcome: str) -> bool:
    """Return whether infrastructure caused this outcome, and not the policy."""
    return outcome in OUTCOMES and OUTCOMES[outcome].cause == "infrastructure"


def _is_counted(facts: OutcomeFacts) -> bool:
    return facts.cause != "training"


def is_failure(outcome: str) -> bool:
    """Return whether an outcome is a failure; limits of length and aborts by training are not."""
    return outcome in FAILURES


def count_failures(outcomes: Mapping[str, Num]) -> Num | int:
    """Count the failed episodes among ended ones: all that a report or a monitor calls failed is counted here."""
    return sum(num for name, num in outcomes.items() if is_failure(name))


def measure_failures(outcomes: Mapping[str, float]) -> float:
    """Return the share that failed of the ended episodes that training did not abort."""
    num = sum(num for name, num in outcomes.items() if name not in ABORTED)
    return count_failures(outcomes) / num if num else 0.0


def format_failed(*, num_failed: int, num_lost: int) -> str:
    """Return how many episodes failed, and how many of them are done all the same, as they are scored for that."""
    num_scored = num_failed - num_lost
    return f"{num_failed:,} failed" + (f" ({num_scored:,} of them scored)" if num_scored else "")


def is_too_old(start_version: int, *, newest: int, max_lag: int) -> bool:
    """Return whether an episode that started with `start_version` is more than `max_lag` versions behind the newest."""
    return newest - start_version > max_lag
