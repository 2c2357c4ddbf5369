"""What follows each end of a job, row by row."""

from typing import get_args

import pytest

from hpcrl.campaign_dir.events import JobOutcome
from hpcrl.campaign_dir.job_end import EndCause, JobEnd
from hpcrl.slurm.end_policy import (
    POLICIES,
    FailureRecord,
    SavedProgress,
    decide_campaign_end,
    find_bad_nodes,
    name_slurm_cause,
)
from hpcrl.slurm.status import ENDED

NEVER = 10**5
ROWS: list[tuple[EndCause, int, int]] = [
    # cause, jobs in a row without a checkpoint that are followed: in a campaign that has one, in one that has none
    ("walltime", 1, 1),
    ("cancellation", 1, 1),
    ("unknown", 1, 1),
    ("preemption", 2, 2),
    ("node-failure", 3, 2),
    ("out-of-memory", 1, 0),
    ("user-code", 0, 0),
    ("infrastructure", 2, 0),
    ("not-started", NEVER, 0),
    ("missing-nodes", NEVER, NEVER),
]
FINAL_CAUSES: tuple[EndCause, ...] = ("complete", "user-request", "goal-reached", "budget-used", "memory-limits")
FAILED = JobEnd(outcome="failed", reason="so it is")


def is_followed(cause: EndCause, *, num_idle: int, has_checkpoint: bool) -> bool:
    return decide_campaign_end(FAILED, cause, SavedProgress(num_idle, num_idle, has_checkpoint)) is None


def test_every_cause_has_a_row_here_and_in_the_table() -> None:
    assert set(POLICIES) == set(get_args(EndCause)) == {row[0] for row in ROWS} | set(FINAL_CAUSES)


@pytest.mark.parametrize("cause", FINAL_CAUSES)
@pytest.mark.parametrize("outcome", get_args(JobOutcome))
def test_no_job_follows_an_end_that_is_final(cause: EndCause, outcome: JobOutcome) -> None:
    end = JobEnd(outcome=outcome, reason="so it is")
    assert decide_campaign_end(end, cause, SavedProgress(3, 0, True)) == (outcome, "so it is")


@pytest.mark.parametrize(("cause", "max_idle", "max_first"), ROWS)
def test_a_job_follows_one_that_made_a_checkpoint_and_some_that_made_none(
    cause: EndCause, max_idle: int, max_first: int
) -> None:
    assert is_followed(cause, num_idle=0, has_checkpoint=True), "it has made a checkpoint itself"
    for limit, has_checkpoint in ((max_idle, True), (max_first, False)):
        if limit:
            assert is_followed(cause, num_idle=limit, has_checkpoint=has_checkpoint)
        if limit < NEVER:
            assert not is_followed(cause, num_idle=limit + 1, has_checkpoint=has_checkpoint)


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("walltime", "raise job.walltime_min"),
        ("preemption", "lower train.checkpoint_every_steps"),
        ("node-failure", "report these nodes"),
        ("out-of-memory", "raise mem_gib_per_worker"),
    ],
)
def test_the_end_of_a_campaign_names_its_jobs_the_cause_and_what_to_change(cause: EndCause, advice: str) -> None:
    assert decide_campaign_end(None, cause, SavedProgress(7, 4, True)) == (
        "failed",
        f"jobs 4 to 7 ended without a checkpoint, the last without an outcome ({cause.replace('-', ' ')}); "
        f"{POLICIES[cause].advice}",
    )
    assert POLICIES[cause].advice.startswith(advice)
    single = decide_campaign_end(FAILED, "user-code", SavedProgress(0, 1, False))
    assert single == ("failed", "so it is")


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("timeout", "walltime"),
        ("preempted", "preemption"),
        ("node_fail", "node-failure"),
        ("out_of_memory", "out-of-memory"),
        ("cancelled", "cancellation"),
        ("launch_failed", "not-started"),
        ("completed", "unknown"),
        ("unknown", "unknown"),
    ],
)
def test_states_of_slurm_have_causes(state: str, cause: EndCause) -> None:
    assert name_slurm_cause(state) == cause
    assert state in (*ENDED, "unknown")


NODES = {"decode": ["g1", "g2", "g3", "g4"], "env": ["c1"]}


@pytest.mark.parametrize(
    ("failures", "bad"),
    [
        ([("decode", "g2")] * 3, ["g2"]),
        ([("decode", "g2")] * 2, []),
        ([("decode", "g2")] * 4 + [("decode", "g1")], ["g2"]),
        ([("decode", name) for name in ("g1", "g2", "g3")] * 3, []),
        ([("env", "c1")] * 9, []),
    ],
    ids=["one node fails", "too seldom", "another failed once", "most fail", "without another node"],
)
def test_a_node_is_bad_if_others_of_its_role_work(failures: list[tuple[str, str]], bad: list[str]) -> None:
    assert find_bad_nodes([FailureRecord(*failure) for failure in failures], NODES) == bad
