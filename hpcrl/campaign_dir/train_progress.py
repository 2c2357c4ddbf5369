"""The progress of the trainer in the present job, by which the driver finds out whether the job has stalled.

TrainProgress         the content of train-progress.json
write_train_progress, read_train_progress    the trainer's half, and the driver's
MIN_DROPPED_GROUPS    constant
"""

from pathlib import Path

import msgspec

from hpcrl.system.files import replace_file

MIN_DROPPED_GROUPS = 16
"""Fewer groups in a row without anything to learn from are chance."""


class TrainProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the trainer since the job started, or since its last step."""

    num_warmup_steps: int = 0
    num_ready_groups: int = 0
    """Whole groups that wait for the next step."""
    num_flat_groups: int = 0
    """Groups dropped as flat since the last step."""
    num_lost_groups: int = 0
    """Groups dropped for a fault, or as too old, since the last step."""
    is_training: bool = False
    """True during a step."""
    reward_error: str = ""
    """The reason of the last reward that could not be computed, if none ever was."""

    failure: str = ""
    """The reason why the trainer has failed for good: started again it would fail again."""

    def is_idle(self, *, groups_per_step: int) -> bool:
        """Return whether scoring made no progress: a whole step of groups was dropped, and none trained on."""
        return self.num_flat_groups + self.num_lost_groups >= max(groups_per_step, MIN_DROPPED_GROUPS)

    def describe_waste(self) -> str:
        """Describe the groups that were dropped, with a fix."""
        flat, lost = self.num_flat_groups, self.num_lost_groups
        causes = [f'{flat} as all their rewards are equal (train.flat_groups = "drop")'] if flat else []
        causes += [f"{lost} for faults or their age"] if lost else []
        fix = "choose tasks that the model sometimes solves, or rewards that differ" if flat else "look at the faults"
        if self.reward_error:
            fix = f"no reward was ever computed, as the reward function failed each time, at last {self.reward_error}"
        return f"{flat + lost} groups were dropped since the last step, {' and '.join(causes)}: {fix}"


def write_train_progress(path: Path, progress: TrainProgress) -> None:
    """Publish the trainer's progress, which no other job reads."""
    replace_file(path, msgspec.json.encode(progress))


def read_train_progress(path: Path) -> TrainProgress:
    """Read the trainer's progress; zeros until it has written the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrainProgress)
    except FileNotFoundError:
        return TrainProgress()
