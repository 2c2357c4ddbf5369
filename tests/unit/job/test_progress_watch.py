"""What ends a job as stalled, and what does not."""

from dataclasses import dataclass, field

import msgspec
import pytest

from hpcrl.campaign_dir.train_progress import MIN_DROPPED_GROUPS, TrainProgress
from hpcrl.job.progress_watch import STEP_FACTOR, ActivityFigures, JobStall, ProgressWatch, count_activity
from tests.support.endpoints import make_endpoint

TIMEOUT_S = 60.0
START_S = 100.0
TOO_LONG_S = TIMEOUT_S + 1
FLAT, LOST = ({f"num_{kind}_groups": MIN_DROPPED_GROUPS} for kind in ("flat", "lost"))


@dataclass
class RunningJob:
    """The figures of a job, which tests change."""

    now: float = 0.0
    progress: TrainProgress = field(default_factory=TrainProgress)
    segments: tuple[int, int] = (0, 0)
    version: int | None = None
    workers: frozenset[str] = frozenset({"000-decode-0"})
    num_tokens: int = 0
    num_looks_at_engines: int = 0
    watch: ProgressWatch = field(init=False)

    def __post_init__(self):
        self.watch = ProgressWatch(
            timeout_s=TIMEOUT_S,
            start_timeout_s=START_S,
            groups_per_step=4,
            read_progress=lambda: self.progress,
            count_segments=lambda: self.segments,
            find_version=lambda: self.version,
            count_activity=self.count_activity,
            clock=lambda: self.now,
        )

    def count_activity(self):
        self.num_looks_at_engines += 1
        return ActivityFigures(self.workers, self.num_tokens)

    def change(self, **progress):
        self.progress = msgspec.structs.replace(self.progress, **progress)

    def look(self) -> JobStall | None:
        return self.watch.look()

    def look_for(self, seconds) -> JobStall | None:
        """Look at the middle and the end of a time in which nothing more changes."""
        middle = self.now + seconds / 2 + 1
        end, self.now = self.now + seconds, middle
        found = self.look()
        self.now = end
        return found or self.look()


@pytest.fixture
def job():
    running = RunningJob()
    assert running.look() is None
    return running


def test_a_job_in_which_nothing_changes_hangs(job):
    assert job.look_for(TIMEOUT_S) is None
    job.now += 1
    found = job.look()
    assert (found.is_final, found.is_hang) == (True, True)
    assert found.reason == (
        "no progress for 1 min (job.stall_timeout_min): the engines 000-decode-0 answer and generate nothing, the "
        "trainer waits for groups"
    )


@pytest.mark.parametrize("change", [{"segments": (1, 0)}, {"segments": (0, 1)}, {"version": 0}])
def test_segments_and_versions_are_progress(job, change):
    for name, value in change.items():
        job.now = TIMEOUT_S
        setattr(job, name, value)
    assert job.look() is None
    assert job.look_for(TIMEOUT_S) is None
    assert job.look_for(1).is_hang


@pytest.mark.parametrize("change", [{"num_warmup_steps": 1}, {"num_ready_groups": 1}])
def test_steps_of_a_warm_up_and_whole_groups_are_progress(job, change):
    job.change(**FLAT)
    job.look()
    job.now += TIMEOUT_S
    job.change(**change)
    assert job.look() is None
    assert job.look_for(TIMEOUT_S) is None


def test_a_first_group_that_is_still_generated_is_not_a_stall_however_long_it_takes(job):
    for _ in range(50):
        assert job.look_for(TIMEOUT_S) is None
        job.num_tokens += 1
        assert job.look_for(1) is None
    assert job.look_for(TOO_LONG_S).is_hang


def test_an_engine_that_joins_is_not_a_stall(job):
    assert job.look_for(TIMEOUT_S) is None
    job.workers |= {"000-decode-1"}
    job.now += 1
    assert job.look() is None


def test_without_an_engine_a_job_has_the_time_that_one_may_take_to_start(job):
    job.workers = frozenset()
    assert job.look_for(TIMEOUT_S + START_S) is None
    assert job.look_for(1).is_hang


def test_a_training_step_may_take_longer_than_anything_else(job):
    job.change(is_training=True)
    assert job.look_for(STEP_FACTOR * TIMEOUT_S) is None
    assert job.look_for(1).is_hang


def test_engines_are_asked_only_if_nothing_changes(job):
    for number in range(100):
        job.now += TIMEOUT_S / 2
        job.segments = (number, 0)
        job.look()
    assert job.num_looks_at_engines == 0


def test_a_job_that_drops_flat_groups_again_and_again_is_reported_and_continues(job):
    job.change(**FLAT)
    job.look()
    for number in range(3):
        job.change(num_flat_groups=100 * (number + 1))
        job.segments = (number, number)
        found = job.look_for(TOO_LONG_S)
        assert (found.is_final, found.is_hang) == (False, False)
        assert f"{100 * (number + 1)} groups were dropped since the last step" in found.reason


def test_a_job_that_hangs_after_flat_groups_is_ended(job):
    job.change(**FLAT)
    job.look()
    assert job.look_for(TOO_LONG_S).is_hang


@pytest.mark.parametrize(
    ("workers", "progress", "seen"),
    [
        ((), {}, "no engine answers, the trainer waits for groups"),
        (("a", "b"), {"is_training": True}, "the engines a, b answer and generate nothing, the trainer is in a step"),
        (("a",), {"num_ready_groups": 3}, "the trainer has 3 groups ready"),
    ],
)
def test_a_stall_names_what_each_role_was_seen_to_do(workers, progress, seen):
    job = RunningJob(workers=frozenset(workers), progress=TrainProgress(**progress))
    job.look()
    found = job.look_for(STEP_FACTOR * TOO_LONG_S + START_S)
    assert found is not None
    assert seen in found.reason


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (LOST, {"num_lost_groups": 99}, "99 for faults or their age"),
        ({"num_flat_groups": 1, **LOST}, {"num_lost_groups": 9999}, "9999 for faults or their age"),
        (FLAT, {"num_flat_groups": 99, "reward_error": "m:f: KeyError: 'x'"}, "m:f: KeyError: 'x'"),
    ],
    ids=["faults", "faults-after-a-flat-group", "no-reward"],
)
def test_a_job_that_can_only_drop_groups_is_ended_with_their_number(job, before, after, reason):
    job.change(**before)
    job.look()
    job.change(**after)
    found = job.look_for(TOO_LONG_S)
    assert (found.is_final, found.is_hang) == (True, False)
    assert reason in found.reason


def test_engines_that_do_not_answer_count_as_none():
    gone = make_endpoint(url="http://127.0.0.1:9")
    assert count_activity([gone]) == ActivityFigures()
    assert count_activity([]) == ActivityFigures()


def test_a_time_in_which_the_job_was_suspended_does_not_count(job):
    job.look_for(TIMEOUT_S - 1)
    job.now += 7200
    job.watch.skip(7200)
    assert job.look_for(TIMEOUT_S / 2 - 1) is None, "engines have some time to work again"
    assert job.look_for(TIMEOUT_S).is_hang
