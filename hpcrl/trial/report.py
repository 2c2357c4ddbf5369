"""Show the episodes of a trial: each as `hpcrl traj show` does, then a line for each domain.

show_trials     prints them
describe_trial  the line of a domain
list_results    the same facts for `--json`
TrialEpisode    one of its objects
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.spool.outcome import is_failure, name_outcome
from hpcrl.spool.record import Trajectory
from hpcrl.spool.segment import write_segment
from hpcrl.system.terminal import escape_to_one_line, make_console
from hpcrl.traj.history import SegmentLocation
from hpcrl.traj.show import show_trajectory
from hpcrl.trial.player import DomainTrial

NUM_BYTES = 300
"""The most of a reason that is shown in the line of a domain."""


class TrialEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An object of `hpcrl try --json`: one episode."""

    domain: str
    id: str
    seed: int
    outcome: str
    reward: float | None
    """None: it was a fault, which is never scored."""
    reward_parts: dict[str, float]
    turns: int
    num_tokens: int
    """Generated and read."""
    reason: str
    """The failure, if there was one."""


def list_results(trials: Sequence[DomainTrial]) -> list[TrialEpisode]:
    """Return the facts of each episode."""
    return [
        TrialEpisode(
            domain=trial.domain,
            id=one.id,
            seed=one.seed,
            outcome=name_outcome(one.status, one.outcome),
            reward=one.reward,
            reward_parts=one.reward_parts,
            turns=len(one.turns),
            num_tokens=len(one),
            reason=find_reason(one),
        )
        for trial in trials
        for one in trial.trajectories
    ]


def show_trials(trials: Sequence[DomainTrial], *, campaign: CampaignDir) -> None:
    """Print every episode, and a line for each domain."""
    console = make_console()
    for trial in trials:
        path = campaign.spool("scored") / f"{trial.domain}.h5"
        write_segment(path, trial.trajectories)
        location = SegmentLocation("scored", path)
        for trajectory in trial.trajectories:
            show_trajectory((location, trajectory), campaign=campaign, tokens=False, as_json=False, is_kept=False)
            console.print()
    for trial in trials:
        console.print(describe_trial(trial), soft_wrap=True, style="" if is_good(trial) else "red")


def is_good(trial: DomainTrial) -> bool:
    """Return whether at least one episode ended well and has a reward."""
    return any(one.reward is not None and not _has_failed(one) for one in trial.trajectories)


def describe_trial(trial: DomainTrial) -> str:
    """Describe a domain in a line: how its episodes ended, the rewards of those that did not fail, why others did."""
    ended = ", ".join(f"{num} {name}" for name, num in Counter(trial.outcomes).most_common())
    rewards = [one.reward for one in trial.trajectories if one.reward is not None and not _has_failed(one)]
    scored = f"mean reward {fmean(rewards):.3g}" if rewards else "no reward"
    reasons = list(dict.fromkeys(filter(None, map(find_reason, trial.trajectories))))
    why = f"; {escape_to_one_line(reasons[-1])[:NUM_BYTES]}" if reasons else ""
    num = len(trial.trajectories)
    return f"domain {trial.domain}: {num} episode{'s' * (num != 1)} ({ended}), {scored}{why}"


def find_reason(trajectory: Trajectory) -> str:
    """Return why an episode failed; empty if it did not."""
    return str(trajectory.extra.get("fault") or trajectory.extra.get("reason") or "")


def _has_failed(trajectory: Trajectory) -> bool:
    return is_failure(name_outcome(trajectory.status, trajectory.outcome))
