"""A reward task: twins are written once, a hanging reward costs itself, and a process that ends is started again."""

import os
import signal
import time

import numpy as np
import pytest

from hpcrl.roles.context import make_judge_report
from hpcrl.roles.reward import ScoringSession
from hpcrl.rollout.judges.proxy import JudgeProxy
from hpcrl.rollout.reward_process import SegmentScores
from hpcrl.rollout.rewards import RewardScore
from hpcrl.spool.segment import write_segment
from hpcrl.system import file_watch
from hpcrl.system.file_watch import NameWatch
from hpcrl.system.files import make_private_dir
from hpcrl.system.processes import list_descendants
from hpcrl.testing.event_lines import read_events
from tests.support.campaign_spools import unscored
from tests.support.clocks import SettableClock
from tests.support.reward_stage import NUM, RewardStage, finish
from tests.support.served_judges import judge_host
from tests.support.trajectories import make_lake_trajectory


@pytest.fixture
def stage(tmp_path):
    stage = RewardStage(tmp_path)
    yield stage
    stage.process.close()


def test_a_reward_that_hangs_costs_its_trajectory_and_not_its_segment(stage):
    stage.add("a.h5")
    session = stage.open("hang_for", index=2)
    session.start(["a.h5"])
    finish(session)
    twin = stage.twin("a.h5")
    assert [one.reward for one in twin] == [0.0, 1.0, 0.0, 3.0]
    assert [one.outcome == twin[0].outcome for one in twin] == [True, True, False, True]
    assert "reward_timeout_s = 0.5 s" in twin[2].extra["reason"]


def test_an_error_of_a_reward_is_counted_by_the_outcome_that_its_episode_had(stage):
    """The domain scores what `max_turns` cut off by its function too."""
    outcomes = ["max-turns", "", "max-turns", "max-turns"]
    stage.add("a.h5", outcomes=outcomes)
    session = stage.open("hang_for", index=2)
    session.start(["a.h5"])
    finish(session)
    (scored,) = [event for event in read_events(stage.campaign.events) if event["event"] == "scored"]
    assert scored["reward_errors"] == {"lake": 1}
    assert scored["replaced_outcomes"] == {"lake": {"max-turns": 1}}


def test_a_failure_is_a_fault_where_its_domain_sets_that(stage):
    stage.add("a.h5")
    session = stage.open("hang_for", index=2, settings=("domains.lake.on_reward_error=fault",))
    session.start(["a.h5"])
    finish(session)
    assert [(one.status, one.reward) for one in stage.twin("a.h5")][1:3] == [("done", 1.0), ("env-fault", None)]


def test_a_function_that_fails_each_time_is_reported_once_for_each_reason_and_power_of_ten(stage):
    for name in (names := [f"{letter}.h5" for letter in "abc"]):
        stage.add(name)
        session = stage.open("refuse", settings=("domains.lake.reward_timeout_s=60",))  # busy cores are slow
        session.start([name])
        finish(session)
    faults = [event for event in read_events(stage.campaign.events) if event["event"] == "fault"]
    text = "tests.support.many_rewards:refuse: ValueError: no 'lake/0/"
    assert [(event["detail"].partition(text)[0], event["num"]) for event in faults] == [
        ("lake/0/0: ", 1),
        ("lake/0/1: ", 10),
    ]
    assert [event["domain"] for event in faults] == ["lake", "lake"]
    assert all("refuse: ValueError" in one.extra["reason"] for name in names for one in stage.twin(name))


def test_what_is_scored_already_is_not_scored_again(stage, tmp_path):
    (tmp_path / "calls").mkdir()
    for name in ("a.h5", "b.h5"):
        stage.add(name)
    session = stage.open("note", directory=str(tmp_path / "calls"))
    session.start(["a.h5"])
    finish(session)
    again = stage.open("note", directory=str(tmp_path / "calls"))
    again.start(["a.h5", "b.h5", "retired.h5"])
    finish(again)
    assert len(list((tmp_path / "calls").iterdir())) == 2 * NUM
    scored = [event["segment"] for event in read_events(stage.campaign.events) if event["event"] == "scored"]
    assert scored == ["a.h5", "b.h5"]


def test_a_process_that_is_killed_is_started_again_for_what_is_left(stage):
    stage.add("a.h5")
    session = stage.open("hang_for", index=2)
    session.start(["a.h5"])
    while not (below := list_descendants()):
        time.sleep(0.01)
    os.kill(min(below), signal.SIGKILL)
    finish(session)
    assert [one.reward for one in stage.twin("a.h5")] == [0.0, 1.0, 0.0, 3.0]


def test_a_task_takes_new_segments_while_a_reward_hangs(stage, monkeypatch):
    stage.add("a.h5")
    stage.add("b.h5")
    run_task = stage.open_task(monkeypatch, "hang_for", index=2)
    run_task("a.h5")
    assert [one.reward for one in stage.twin("b.h5")] == [0.0, 1.0, 0.0, 3.0]


def test_a_task_of_reward_jobs_leaves_what_takes_long_to_the_next(stage, monkeypatch, tmp_path):
    (tmp_path / "calls").mkdir()
    stage.add("a.h5")
    run_task = stage.open_task(
        monkeypatch, "block_together", placement="elastic", directory=str(tmp_path / "calls"), num=NUM + 1
    )
    run_task("a.h5")
    assert not (stage.campaign.spool("scored") / "a.h5").exists()
    (tmp_path / "calls" / "last").touch()
    while not (stage.campaign.spool("scored") / "a.h5").exists():
        run_task("a.h5")
    assert [one.reward for one in stage.twin("a.h5")] == [0.0, 1.0, 2.0, 3.0]
    assert [event["segment"] for event in read_events(stage.campaign.events) if event["event"] == "scored"] == ["a.h5"]


def test_a_twin_has_the_log_probs_of_the_teacher_and_a_fault_where_it_gave_none(tmp_path, tiny_model_dir):
    stage = RewardStage(tmp_path, teacher="grader")
    odd = unscored(make_lake_trajectory(0, 1, token_ids=[500] * 11))
    write_segment(stage.campaign.spool("rollouts") / "a.h5", [unscored(make_lake_trajectory()), odd])
    with judge_host(tiny_model_dir, tmp_path / "endpoints") as host, JudgeProxy({"grader": host.directory}, job=0):
        host.start()
        session = stage.open(
            "die_for", settings=("judge.grader.tiny={}", "teacher.judge=grader", "train.kl=k2"), index=9
        )
        session.start(["a.h5"])
        finish(session)
        stage.process.close()
    scored, failed = stage.twin("a.h5")
    assert scored.reward == 0.0
    assert (scored.teacher_logprobs[scored.loss_mask] < 0).all()
    assert (failed.status, failed.reward) == ("env-fault", None)
    assert np.isnan(failed.teacher_logprobs).all()
    (fault,) = [event for event in read_events(stage.campaign.events) if event["event"] == "fault"]
    assert "lake/0/1: teacher.judge = 'grader'" in fault["detail"]


def test_a_segment_whose_judge_ended_first_with_the_job_is_left_to_the_next_job(stage, monkeypatch):
    monkeypatch.setattr(file_watch, "PAUSE_SHARE", 0.1)
    stage.add("a.h5")
    context = stage.open("hang_for", index=9, settings=("judge.grader.tiny={}",))._context
    session, drain = ScoringSession(context, stage.process, stage.faults), context.job.drain
    failed = SegmentScores(segment="a.h5", scores=[RewardScore(error="the judge does not answer")] * NUM)
    make_private_dir(drain.parent)
    for act in (
        lambda: make_judge_report(context)("the judge has ended"),
        lambda: session._write_twin("a.h5", failed),
    ):
        clock = SettableClock()
        context._requests = NameWatch(drain.parent, clock=clock)
        for clock.now in (0.0, 100.0, 200.0):
            assert not context.draining
        drain.touch()
        assert not context.draining, "this worker looks again in 2 s"
        act()
        drain.unlink()
    assert not list(stage.campaign.spool("scored").glob("*.h5"))
    assert read_events(stage.campaign.events) == []
    session._write_twin("a.h5", failed)
    assert len(stage.twin("a.h5")) == NUM, "without a judge, while the job runs"
