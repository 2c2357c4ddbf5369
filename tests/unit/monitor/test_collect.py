"""The monitor's input: campaign directories written by real event logs."""

import contextlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpcrl.campaign_dir.events import (
    EngineCounted,
    EpisodesCounted,
    EvaluationFinished,
    JobEnded,
    JobStarted,
    LayoutChosen,
    MemoryRanOut,
    RowsSkipped,
    SegmentScored,
    StaleDropped,
    StepFinished,
    TaskFailed,
    TrainingResumed,
    WorkerFailed,
    WorkerRestarted,
    WorkerStarted,
)
from hpcrl.campaign_dir.paths import CampaignDir, parse_role
from hpcrl.errors import SlurmError
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.job_state import (
    JobFacts,
    JobState,
    derive_campaign_state,
    derive_job_state,
    describe_lost_jobs,
)
from hpcrl.monitor.progress import name_subject
from hpcrl.monitor.snapshot import CampaignSnapshot, encode_snapshot, measure_change
from hpcrl.monitor.view import survey_campaigns
from hpcrl.rollout.flow_control import SettledCount, SettledWriter
from hpcrl.slurm.status import JobStatus, parse_queue
from hpcrl.system.files import publish_json, read_json
from tests.support.synthetic import T0, SyntheticCampaign

RUNNING = """\
123+0|123|RUNNING|env|2026-11-20T10:00:00|N/A|env[0-1]|None
123+1|124|RUNNING|prefill|2026-11-20T10:00:00|N/A|prefill0|None
123+2|125|RUNNING|decode|2026-11-20T10:00:00|N/A|decode0|None
123+3|126|RUNNING|train|2026-11-20T10:00:00|N/A|train0|None
"""


class RecordedQueries:
    """A stand-in for Slurm that records the queries."""

    def __init__(self, text: str = RUNNING) -> None:
        self.text = text
        self.asked: list[list[str]] = []

    def __call__(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        self.asked.append(list(ids))
        found = parse_queue(self.text)
        return {job: found.get(job, JobStatus(id=job, state="unknown", reason="no answer")) for job in ids}


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[SyntheticCampaign]:
    campaign = SyntheticCampaign(tmp_path / "quickstart-1")
    yield campaign
    campaign.close()


def collector(campaign: SyntheticCampaign, ask: RecordedQueries | None = None) -> SnapshotCollector:
    return SnapshotCollector(campaign.directory, query=ask or RecordedQueries(), clock=lambda: campaign.now)


def running(campaign: SyntheticCampaign) -> SyntheticCampaign:
    campaign.submit()
    campaign.start()
    return campaign


def test_the_records_of_jobs_are_read_rarely_where_that_is_asked_for(
    campaign: SyntheticCampaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(campaign).step(1)
    turn = 1000.0
    monkeypatch.setattr("hpcrl.monitor.collect.time.monotonic", lambda: turn)
    rare = SnapshotCollector(
        campaign.directory, query=RecordedQueries(), clock=lambda: campaign.now, job_interval_s=1.0
    )
    assert rare.poll().state == "running"
    campaign.outcome("done", "every training step was made")
    turn = 1000.9
    assert rare.poll().state == "running"
    turn = 1001.1
    assert rare.poll().state == "done"


# The contract


def test_the_json_has_exactly_the_fields_of_the_contract(campaign: SyntheticCampaign) -> None:
    running(campaign).step(1)

    printed = json.loads(encode_snapshot(collector(campaign).poll()))

    assert set(printed) == {
        "name", "state", "is_partial", "recipe", "site", "created", "jobs", "roles", "version", "step", "num_steps",
        "episodes", "accounts", "domains", "reward_mean", "evaluations", "lengths", "failed_tasks", "tokens_per_s",
        "spools", "advisories",
    }  # fmt: skip
    assert printed["name"] == "quickstart-1"
    assert (printed["recipe"], printed["site"], printed["created"]) == ("quickstart", "lab", T0)
    assert printed["jobs"][0]["components"][0] == {
        "index": 0, "partition": "env", "state": "running", "num_nodes": 2, "nodes": ["env0", "env1"],
        "roles": ["env", "reward"],
    }  # fmt: skip
    assert printed["roles"]["decode"] == {"workers": 1, "alive": 1}
    assert printed["roles"]["reward"] == {"workers": 1, "alive": 1, "queue": 0}
    assert printed["episodes"] == {
        "done": 0, "truncated": 0, "aborted": 0, "faulted": 0, "failed": 0, "running": 0, "loop_share": 0.0,
        "loop_delay_s": 0.0,
    }  # fmt: skip
    assert printed["spools"] == [{"name": "rollouts", "depth": 0}, {"name": "scored", "depth": 0}]
    assert (printed["step"], printed["num_steps"], printed["version"], printed["reward_mean"]) == (1, 10, 1, [0.1])


def test_the_json_has_the_rewards_and_the_episode_counts_of_a_campaign(campaign: SyntheticCampaign) -> None:
    running(campaign).emit("env-0", EpisodesCounted(running=2, done=5, truncated=1, aborted_stale=2, env_fault=1))
    campaign.emit("reward-0", SegmentScored(num=2, rewards={"sums": [1.0, 0.0]}))
    campaign.emit("reward-0", SegmentScored(num=300, rewards={"sums": [1.0] * 300}))

    printed = json.loads(encode_snapshot(collector(campaign).poll()))

    assert printed["accounts"] == {
        "done": 5, "truncated": 1, "aborted_stale": 2, "aborted_redundant": 0, "env_fault": 1, "policy_fault": 0,
    }  # fmt: skip
    sums = printed["domains"]["sums"]
    assert (sums["scored"], sums["reward_recent"]) == (302, 1.0)
    assert sums["reward_mean"] == pytest.approx(301 / 302)


def test_the_json_has_the_share_of_tokens_that_is_trained(campaign: SyntheticCampaign) -> None:
    running(campaign).emit("env-0", EpisodesCounted(token_fates={"sums": {"trained": 50}}))
    campaign.emit("env-0", EpisodesCounted(token_fates={"sums": {"trained": 150, "sampling": 20}}))
    campaign.emit(
        "env-1",
        EpisodesCounted(token_fates={"sums": {"trained": 30, "aborted-redundant": 900}, "chat": {"trained": 5}}),
    )
    campaign.emit("train-0", StaleDropped(num=1, token_counts={"sums": 10}))
    campaign.emit("train-0", StepFinished(step=2, version=2, too_long_tokens={"sums": 6}))
    domains = json.loads(encode_snapshot(collector(campaign).poll()))["domains"]
    assert domains["sums"]["token_fates"] == {
        "trained": 164, "sampling": 20, "aborted-redundant": 900, "stale": 10, "too-long": 6,
    }  # fmt: skip
    assert domains["sums"]["trained_share"] == pytest.approx(164 / 200)
    assert domains["chat"]["trained_share"] == 1.0


def test_the_snapshot_has_what_the_trainer_leaves_out_for_lack_of_memory(campaign: SyntheticCampaign) -> None:
    running(campaign)
    looking = collector(campaign)
    assert looking.poll().detail.memory == ""
    campaign.emit("driver", MemoryRanOut(step=2, tokens_per_micro_batch=4500, max_row_tokens=9000, reason="it ran out"))
    for _ in range(2):  # the step was repeated after a resume
        campaign.emit("train-0", StepFinished(step=2, version=2, num_tokens=970))
        campaign.emit("train-0", RowsSkipped(step=2, num=1, num_tokens=30, limit=9000))
    detail = looking.poll().detail
    left_out = "1 rows over 9,000 tokens left out, 3.0% of tokens"
    assert detail.memory == f"memory ran out: micro-batches of 4,500 tokens   {left_out}"
    assert [(note.text, note.bad) for note in detail.notes if "ran out" in note.text] == [("it ran out", True)]


def test_the_json_has_the_lengths_of_episodes_started_finished_and_trained(campaign: SyntheticCampaign) -> None:
    """A share of long episodes that is smaller in training than before shows what prefers short ones."""
    running(campaign).emit("env-0", EpisodesCounted(lengths={"done": {"4": 1, "tokens": 10}}))
    lengths = {"done": {"4": 3, "tokens": 36}, "aborted-stale": {"7": 1, "tokens": 100}}
    campaign.emit("env-0", EpisodesCounted(lengths=lengths))
    for _ in range(2):  # the step was repeated after a resume
        campaign.emit("train-0", StepFinished(step=2, version=2, lengths={"4": 2, "tokens": 20}))
    printed = json.loads(encode_snapshot(collector(campaign).poll()))["lengths"]
    assert {name: (one["num"], one["mean"]) for name, one in printed.items()} == {
        "started": (4, 34.0), "finished": (3, 12.0), "trained": (2, 10.0),
    }  # fmt: skip
    assert printed["finished"]["p50"] == pytest.approx(12.0)
    assert 64 < printed["started"]["p90"] < 128


def test_the_json_names_the_tasks_that_were_abandoned_once(campaign: SyntheticCampaign) -> None:
    running(campaign)
    for reason in ("its last episode: env-fault", "its env worker or job ended before it"):
        campaign.emit("env-0", TaskFailed(id="sums/7", domain="sums", seed=5, place=2, reason=reason))
    printed = json.loads(encode_snapshot(collector(campaign).poll()))["failed_tasks"]
    assert printed == [
        {"group": "sums/7", "seed": 5, "place": 2, "reason": "its env worker or job ended before it"},
    ]


def test_the_reward_that_a_campaign_started_from_stays_the_same_as_it_runs(campaign: SyntheticCampaign) -> None:
    campaign.submit()
    campaign.start()
    reading, seen = collector(campaign), []
    for step in range(1, 201):
        campaign.step(step, reward=step / 100)
        if step in (10, 20, 200):
            seen.append(measure_change(reading.poll().reward_mean))
    assert [change.first for change in seen if change] == [pytest.approx(0.03)] * 3
    assert [change.last for change in seen if change] == [pytest.approx(last) for last in (0.08, 0.18, 1.98)]


@pytest.mark.parametrize(("num", "window"), [(1, 1), (3, 1), (4, 2), (9, 4), (10, 5), (1000, 5)])
def test_a_change_has_equal_numbers_of_first_and_last_steps(num: int, window: int) -> None:
    change = measure_change(list(range(num)))
    assert change == ((window - 1) / 2, num - (window + 1) / 2, window)


def test_a_worker_that_starts_again_counts_its_tokens_from_zero(campaign: SyntheticCampaign) -> None:
    running(campaign).emit("env-0", EpisodesCounted(done=3, token_fates={"sums": {"trained": 50}}))
    campaign.emit("env-0", EpisodesCounted(done=1, token_fates={"sums": {"trained": 8}}))
    assert collector(campaign).poll().domains["sums"].token_fates == {"trained": 58}


def test_events_without_counts_of_tokens_give_no_share(campaign: SyntheticCampaign) -> None:
    running(campaign).emit("reward-0", SegmentScored(num=1, rewards={"sums": [1.0]}))
    assert collector(campaign).poll().domains["sums"].trained_share is None


def test_the_nodes_of_one_allocation_are_shown_by_component(campaign: SyntheticCampaign) -> None:
    publish_json(campaign.directory.plan, read_json(campaign.directory.plan) | {"layout": "hetstep"})
    nodes = [["gpu1"], ["gpu2"], ["gpu3"], ["gpu4", "gpu5"]]
    running(campaign).emit("driver", LayoutChosen(layout="hetstep", reason="one allocation", nodes=nodes))
    slurm = RecordedQueries("123|123|RUNNING|gpu|2026-11-20T10:00:00|N/A|gpu[1-5]|None\n")

    components = collector(campaign, slurm).poll().jobs[0].components

    assert [component.nodes for component in components] == nodes
    assert {(component.partition, component.state) for component in components} == {("gpu", "running")}


def test_a_role_without_workers_has_the_partition_of_the_plan_and_not_the_name_of_slurm(
    campaign: SyntheticCampaign,
) -> None:
    campaign.submit()
    slurm = RecordedQueries("123|123|RUNNING|slurms-own|2026-11-20T10:00:00|N/A|n1|None\n")
    snapshot = collector(campaign, slurm).poll()
    assert snapshot.jobs[0].components[0].partition == "slurms-own"
    assert snapshot.detail.roles["reward"].partitions == ["env"]


def test_a_pending_allocation_is_queued_with_all_its_components(campaign: SyntheticCampaign) -> None:
    publish_json(campaign.directory.plan, read_json(campaign.directory.plan) | {"layout": "hetstep"})
    campaign.submit()
    slurm = RecordedQueries("123|123|PENDING|gpu|N/A|N/A||Resources\n")

    [job] = collector(campaign, slurm).poll().jobs

    assert {(component.state, tuple(component.nodes)) for component in job.components} == {("queued", ())}


def test_a_campaign_without_a_job_is_planned_with_the_workers_of_its_plan(campaign: SyntheticCampaign) -> None:
    snapshot = collector(campaign).poll()

    assert snapshot.state == "planned"
    assert snapshot.roles["env"].workers == 1
    assert snapshot.roles["env"].alive == 0


def test_the_driver_is_not_a_role(campaign: SyntheticCampaign) -> None:
    assert "driver" not in collector(running(campaign)).poll().roles


def test_a_job_that_slurm_was_not_asked_about_has_the_nodes_of_its_workers(campaign: SyntheticCampaign) -> None:
    running(campaign).outcome("done")
    slurm = RecordedQueries()

    component = collector(campaign, slurm).poll().jobs[0].components[2]

    assert (component.state, component.nodes) == ("done", ["decode0"])
    assert slurm.asked == []


# Folding


def test_counts_of_env_workers_are_summed_over_workers_and_jobs(campaign: SyntheticCampaign) -> None:
    running(campaign)
    counts = {"running": 4, "done": 10, "truncated": 2, "aborted_stale": 1, "aborted_redundant": 2, "env_fault": 3}
    campaign.emit("env-0", EpisodesCounted(**counts, policy_fault=1, num_tokens=100))
    campaign.emit("env-1", EpisodesCounted(running=1, done=5, num_tokens=50))
    reading = collector(campaign)
    reading.poll()
    campaign.emit("env-0", EpisodesCounted(**{**counts, "done": 11}, policy_fault=1, num_tokens=120))

    episodes = reading.poll().episodes

    assert (episodes.done, episodes.truncated, episodes.num_kept) == (16, 2, 18)
    assert (episodes.aborted, episodes.faulted, episodes.running) == (3, 4, 5)


def test_the_counts_of_a_restarted_env_worker_are_added_to_the_earlier_ones(campaign: SyntheticCampaign) -> None:
    running(campaign)
    campaign.emit("env-0", EpisodesCounted(done=10, num_tokens=100))
    campaign.emit("env-0", WorkerStarted(pid=2, gpus=[]))
    campaign.emit("env-0", EpisodesCounted(done=2, num_tokens=20))

    snapshot = collector(campaign).poll()

    assert snapshot.episodes.done == 12
    assert snapshot.detail.num_tokens == 120


def test_episodes_of_a_failed_worker_are_not_running(campaign: SyntheticCampaign) -> None:
    running(campaign)
    campaign.emit("env-0", EpisodesCounted(running=7, done=1))
    campaign.now += 1
    campaign.emit("driver", WorkerFailed(of="env-0", reason="exit code -9"))

    snapshot = collector(campaign).poll()

    assert snapshot.episodes.running == 0
    assert snapshot.roles["env"].alive == 0


def test_a_step_repeated_after_a_resume_replaces_the_earlier_one(campaign: SyntheticCampaign) -> None:
    running(campaign)
    for step in (1, 2, 3, 4):
        campaign.step(step)
    reading = collector(campaign)
    reading.poll()
    campaign.outcome("drained", "walltime")
    campaign.submit(1, job="200")
    campaign.now += 100
    campaign.start(job=1)
    campaign.step(3, job=1, reward=9.0)

    snapshot = reading.poll()

    assert snapshot.reward_mean == [0.1, 0.2, 9.0]
    assert snapshot.step == 3


def test_a_resume_removes_the_steps_after_the_checkpoint(campaign: SyntheticCampaign) -> None:
    running(campaign)
    for step in (1, 2, 3):
        campaign.step(step)
    campaign.emit("train-0", TrainingResumed(step=1, version=1, checkpoint="x"))

    snapshot = collector(campaign).poll()

    assert snapshot.reward_mean == [0.1]
    assert snapshot.version == 3, "versions never decrease"


def test_jobs_are_folded_in_their_order_whatever_the_clocks_of_their_nodes_show(campaign: SyntheticCampaign) -> None:
    running(campaign)
    for step in (1, 2, 3):
        campaign.step(step)
    campaign.submit(1)
    campaign.now -= 50  # the node of the second job is behind
    campaign.start(job=1)
    campaign.step(2, job=1, reward=7.0)

    assert collector(campaign).poll().reward_mean == [0.1, 7.0]


def test_incremental_reading_gives_the_same_result_as_reading_at_once(campaign: SyntheticCampaign) -> None:
    running(campaign)
    incremental = collector(campaign)
    for step in range(1, 8):
        campaign.step(step)
        campaign.emit("env-0", EpisodesCounted(done=step * 3, num_tokens=step * 10))
        incremental.poll()

    assert encode_snapshot(incremental.poll()) == encode_snapshot(collector(campaign).poll())


def test_tokens_per_second_are_those_of_the_last_minute_while_it_runs(campaign: SyntheticCampaign) -> None:
    running(campaign)
    campaign.emit("env-0", EpisodesCounted(num_tokens=1_000_000))
    for _ in range(100):
        campaign.now += 1
        campaign.emit("env-0", EpisodesCounted(num_tokens=1_000_000 + int(campaign.now - T0) * 50))

    assert collector(campaign).poll().tokens_per_s == pytest.approx(50, rel=0.05)


def test_tokens_per_second_of_an_ended_campaign_are_its_mean(campaign: SyntheticCampaign) -> None:
    running(campaign)
    campaign.now += 100
    campaign.emit("env-0", EpisodesCounted(num_tokens=5000))
    campaign.outcome("done")
    campaign.now += 10_000

    assert collector(campaign).poll().tokens_per_s == pytest.approx(50)


def test_spool_depths_count_what_the_next_stage_has_not_consumed(campaign: SyntheticCampaign) -> None:
    running(campaign)
    for number in range(5):
        campaign.segment("rollouts", number, 16)
    for number in range(3):
        campaign.segment("scored", number, 16)
    SettledWriter(campaign.directory.settled).write(SettledCount(num=24, version=1, workers={"env-0": 24}))

    assert [(spool.name, spool.depth) for spool in collector(campaign).poll().spools] == [
        ("rollouts", 32), ("scored", 24),
    ]  # fmt: skip


def test_a_worker_is_alive_while_it_touches_its_file(campaign: SyntheticCampaign) -> None:
    running(campaign)
    campaign.now += 31
    campaign.beat("000-decode-0")

    roles = collector(campaign).poll().roles

    assert roles["decode"].alive == 1
    assert roles["prefill"].alive == 0


def test_a_restarted_worker_is_alive_again(campaign: SyntheticCampaign) -> None:
    running(campaign)
    campaign.now += 1
    campaign.emit("driver", WorkerFailed(of="decode-0", reason="exit code 1"))
    reading = collector(campaign)
    assert reading.poll().roles["decode"].alive == 0
    campaign.emit("driver", WorkerRestarted(of="decode-0"))

    assert reading.poll().roles["decode"].alive == 1


@pytest.mark.parametrize("of", ["decode-0", "000-decode-0"])
def test_an_event_of_the_driver_is_about_the_worker_that_it_names(of: str) -> None:
    subject = name_subject(WorkerFailed(worker="000-driver", role="driver", of=of))
    assert (subject, parse_role(subject)) == ("000-decode-0", "decode")


def test_a_worker_that_reports_its_own_failure_by_its_full_name_is_the_same_worker(campaign: SyntheticCampaign) -> None:
    running(campaign).emit("decode-0", WorkerFailed(of="000-decode-0", reason="RuntimeError"))

    decode = collector(campaign).poll().roles["decode"]

    assert (decode.workers, decode.alive) == (1, 0)


# States


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (JobFacts(outcome="done", slurm="running"), "done"),
        (JobFacts(outcome="failed"), "failed"),
        (JobFacts(outcome="stopped"), "stopped"),
        (JobFacts(outcome="drained"), "drained"),
        (JobFacts(outcome="something else"), "unknown"),
        (JobFacts(slurm="pending"), "queued"),
        (JobFacts(slurm="pending", end_requested=True), "queued"),
        (JobFacts(slurm="pending", silence_s=1.0), "running"),
        (JobFacts(slurm="running"), "running"),
        (JobFacts(slurm="completing", end_requested=True), "draining"),
        (JobFacts(slurm="unknown"), "unknown"),
        (JobFacts(slurm="unknown", silence_s=1.0), "running"),
        (JobFacts(slurm="a_new_word"), "unknown"),
        (JobFacts(slurm="cancelled"), "stopped"),
        (JobFacts(slurm="timeout", silence_s=1.0), "failed"),
        (JobFacts(slurm="completed"), "failed"),
        (JobFacts(guardian_alive=True), "running"),
        (JobFacts(guardian_alive=True, end_requested=True), "draining"),
        (JobFacts(guardian_alive=False), "failed"),
        (JobFacts(guardian_alive=False, silence_s=1.0), "failed"),
        (JobFacts(guardian_alive=None), "unknown"),
        (JobFacts(guardian_alive=None, silence_s=1.0), "running"),
    ],
)
def test_the_state_of_a_job_follows_from_the_known_facts(facts: JobFacts, state: str) -> None:
    assert derive_job_state(facts)[0] == state


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (JobFacts(slurm="failed"), "its batch script failed before the driver could report a reason"),
        (JobFacts(slurm="failed", silence_s=6.0, slurm_reason="x"), "its driver ended without reporting a reason"),
        (JobFacts(slurm="unknown"), "Slurm cannot be queried here"),
        (
            JobFacts(slurm="unknown", silence_s=5400.0),
            "Slurm cannot be queried here; its processes have been silent",
        ),
        (JobFacts(slurm="a_new_word"), "Slurm reports the state a_new_word"),
    ],
)
def test_the_end_of_a_driver_that_was_killed_is_not_that_of_a_batch_script_that_did_not_start(
    facts: JobFacts, reason: str
) -> None:
    assert derive_job_state(facts)[1].startswith(reason)


@pytest.mark.parametrize(
    ("jobs", "stop", "state"),
    [
        ([], False, "planned"),
        ([], True, "stopped"),
        (["queued"], False, "queued"),
        (["drained", "queued"], False, "queued"),
        (["running", "queued"], False, "running"),
        (["drained", "draining"], False, "draining"),
        (["drained"], False, "stopped"),
        (["stopped"], True, "stopped"),
        (["failed", "done"], False, "done"),
        (["done", "failed"], False, "failed"),
        (["drained", "unknown"], False, "unknown"),
    ],
)
def test_the_state_of_a_campaign_follows_from_its_jobs(jobs: list[JobState], stop: bool, state: str) -> None:
    assert derive_campaign_state(jobs, stop_requested=stop) == state


def test_a_local_run_whose_driver_was_killed_is_failed(campaign: SyntheticCampaign) -> None:
    campaign.submit_local(pid=2**22 + 1)

    snapshot = collector(campaign).poll()

    assert snapshot.state == "failed"
    assert "it ended without an outcome" in snapshot.jobs[0].reason


def test_nothing_works_any_more_in_a_campaign_that_was_killed(campaign: SyntheticCampaign) -> None:
    campaign.submit_local(pid=2**22 + 1)
    for role in ("env", "prefill", "decode", "reward", "train"):
        campaign.emit(f"{role}-0", WorkerStarted(pid=1, gpus=[]))
    campaign.emit("env-0", EpisodesCounted(running=94, done=8, num_tokens=60))
    campaign.emit("decode-0", EngineCounted(window_s=10.0, busy_share=0.9, num_tokens=500, kv_share=0.5))
    campaign.step(1)
    snapshot = collector(campaign).poll()
    assert snapshot.state == "failed"
    assert snapshot.episodes.running == 0
    roles = json.loads(encode_snapshot(snapshot))["roles"]
    assert roles == {role: {"workers": 1, "alive": 0} for role in ("env", "prefill", "decode", "reward", "train")}


def test_a_local_run_whose_driver_is_alive_is_running_and_slurm_is_not_asked(campaign: SyntheticCampaign) -> None:
    campaign.submit_local()
    slurm = RecordedQueries()

    assert collector(campaign, slurm).poll().state == "running"
    assert slurm.asked == []


def test_a_reused_pid_is_not_the_driver(campaign: SyntheticCampaign) -> None:
    campaign.submit_local()
    path = campaign.directory.job(0).submission
    path.write_text(json.dumps({**json.loads(path.read_text()), "start_ticks": 1}))

    assert collector(campaign).poll().state == "failed"


def test_a_local_run_on_another_machine_is_judged_by_its_heartbeats(campaign: SyntheticCampaign) -> None:
    campaign.submit_local(pid=2**22 + 1)
    campaign.emit("driver", JobStarted(slurm_id=None, end_time=None, node="another-login-node"))

    reading = collector(campaign)

    assert reading.poll().state == "running"
    campaign.now += 31
    assert reading.poll().state == "unknown"


def test_a_stop_file_makes_a_running_campaign_draining(campaign: SyntheticCampaign) -> None:
    running(campaign).directory.stop.touch()

    assert collector(campaign).poll().state == "draining"


def test_a_drained_campaign_without_a_next_job_is_stopped_with_a_hint_to_resume(campaign: SyntheticCampaign) -> None:
    running(campaign).outcome("drained", "its walltime is nearly over")

    snapshot = collector(campaign).poll()

    assert snapshot.state == "stopped"
    assert snapshot.jobs[0].state == "drained"
    assert snapshot.jobs[0].reason.endswith("over; without a checkpoint, `hpcrl resume` starts at step 0")


@pytest.mark.parametrize(
    ("num_steps", "hint"),
    [
        (50, "`hpcrl resume` continues from step 50"),
        (51, "`hpcrl resume` continues from step 50 (1 step is made again)"),
        (52, "`hpcrl resume` continues from step 50 (2 steps are made again)"),
    ],
)
def test_the_hint_to_resume_names_the_step_and_what_is_made_again(
    campaign: SyntheticCampaign, num_steps: int, hint: str
) -> None:
    running(campaign)
    (campaign.directory.checkpoints / "000005-step-000050").mkdir(parents=True)
    for step in range(1, num_steps + 1):
        campaign.step(step)
    campaign.outcome("drained", "its walltime is nearly over")
    assert collector(campaign).poll().jobs[0].reason == f"its walltime is nearly over; {hint}"
    (line,) = survey_campaigns([campaign.directory], problems=[])  # it reads no events
    assert line.reason == "its walltime is nearly over; `hpcrl resume` continues from step 50"


def test_a_driver_that_reported_its_end_is_draining_until_it_writes_its_outcome(campaign: SyntheticCampaign) -> None:
    running(campaign).emit("driver", JobEnded(outcome="done", reason="every training step was made"))
    reading = collector(campaign)
    assert reading.poll().state == "draining"
    campaign.outcome("done", "every training step was made")

    assert reading.poll().state == "done"


def test_the_end_event_is_the_outcome_of_a_driver_that_could_not_write_one(campaign: SyntheticCampaign) -> None:
    running(campaign).emit("driver", JobEnded(outcome="done", reason="every training step was made"))
    campaign.now += 60

    assert collector(campaign, RecordedQueries("")).poll().state == "done"


def test_slurm_is_queried_once_in_half_a_minute_for_jobs_without_an_outcome(campaign: SyntheticCampaign) -> None:
    campaign.submit(0, job="100")
    campaign.outcome("drained", number=0)
    campaign.submit(1, job="123")
    campaign.submit(2, job="300")
    slurm = RecordedQueries()
    reading = collector(campaign, slurm)
    for _ in range(31):
        reading.poll()
        campaign.now += 1

    assert slurm.asked == [["123", "300"], ["123", "300"]]


def test_a_job_that_slurm_requeues_is_read_again(campaign: SyntheticCampaign) -> None:
    running(campaign).outcome("drained", "it received SIGTERM")
    reading = collector(campaign)
    assert reading.poll().state == "stopped"
    campaign.directory.job(0).outcome.unlink()  # as a driver does that starts a second time
    campaign.start()

    assert reading.poll().state == "running"


def test_a_queued_campaign_has_a_reason(campaign: SyntheticCampaign) -> None:
    campaign.submit()
    slurm = RecordedQueries(RUNNING.replace("RUNNING", "PENDING").replace("|None", "|Priority"))

    snapshot = collector(campaign, slurm).poll()

    assert snapshot.state == "queued"
    assert snapshot.jobs[0].reason == "jobs of higher priority are ahead of it"
    assert {component.state for component in snapshot.jobs[0].components} == {"queued"}


def test_a_running_job_is_shown_and_not_the_one_that_waits_for_it(campaign: SyntheticCampaign) -> None:
    running(campaign).submit(1, job="200")
    waits = RUNNING.replace("123", "200").replace("RUNNING", "PENDING").replace("|None", "|Dependency")
    slurm = RecordedQueries(RUNNING + waits)

    snapshot = collector(campaign, slurm).poll()

    assert (snapshot.state, snapshot.detail.job_id, snapshot.detail.reason) == ("running", "123", "")
    assert [job.state for job in snapshot.jobs] == ["running", "queued"]
    campaign.outcome("drained", "its walltime is nearly over")
    slurm.text = waits
    campaign.now += 60
    snapshot = collector(campaign, slurm).poll()
    assert (snapshot.state, snapshot.detail.job_id) == ("queued", "200")
    assert snapshot.detail.reason == "it waits for another job to end"


def test_an_outcome_that_is_recorded_between_the_looks_at_the_job_and_at_slurm_is_seen(
    campaign: SyntheticCampaign,
) -> None:
    """A job that had just ended was `failed` for one look, which ended `submit --watch` with code 1."""
    campaign.submit()

    def end(ids: Sequence[str]) -> dict[str, JobStatus]:
        campaign.emit("driver", JobEnded(outcome="done", reason="its last step"))
        campaign.outcome("done", "its last step")
        return {id: JobStatus(id=id, state="completed") for id in ids}

    snapshot = SnapshotCollector(campaign.directory, query=end, clock=lambda: campaign.now).poll()

    assert snapshot.state == "done"
    assert snapshot.detail.reason == "its last step"


def test_missing_slurm_leaves_the_job_unknown_and_is_reported(campaign: SyntheticCampaign) -> None:
    campaign.submit()

    def missing(ids: Sequence[str]) -> dict[str, JobStatus]:
        raise SlurmError("squeue cannot be run: load the module")

    snapshot = SnapshotCollector(campaign.directory, query=missing, clock=lambda: campaign.now).poll()

    assert snapshot.state == "unknown"
    assert snapshot.detail.problems == ["squeue cannot be run: load the module"]


def test_campaigns_are_listed_with_their_states_and_no_event_is_read(tmp_path: Path) -> None:
    done, planned = SyntheticCampaign(tmp_path / "a"), SyntheticCampaign(tmp_path / "b")
    done.submit()
    done.outcome("done")
    problems: list[str] = []

    listed = survey_campaigns([done.directory, planned.directory], problems=problems)

    assert [(line.name, line.site, line.state, line.created) for line in listed] == [
        ("a", "lab", "done", T0), ("b", "lab", "planned", T0),
    ]  # fmt: skip
    assert problems == []


# Garbage and half-written campaigns


def poll(campaign: CampaignDir) -> CampaignSnapshot:
    snapshot = SnapshotCollector(campaign, query=RecordedQueries(), clock=lambda: T0).poll()
    encode_snapshot(snapshot)
    return snapshot


def test_an_empty_directory_is_a_planned_campaign(tmp_path: Path) -> None:
    snapshot = poll(CampaignDir(tmp_path))

    assert (snapshot.state, snapshot.name, snapshot.recipe) == ("planned", tmp_path.name, None)


def test_a_missing_directory_gives_a_snapshot_too(tmp_path: Path) -> None:
    assert poll(CampaignDir(tmp_path / "nowhere")).state == "planned"


def test_a_torn_last_line_waits_and_counts_once(campaign: SyntheticCampaign) -> None:
    running(campaign).step(1)
    path = campaign.directory.events / "000-train-0.jsonl"
    line = json.dumps({"time": T0, "event": "step", "job": 0, "worker": "000-train-0", "step": 2, "reward_mean": 0.5})
    with path.open("a") as file:
        file.write(line[:20])
    reading = collector(campaign)
    assert reading.poll().step == 1
    with path.open("a") as file:
        file.write(line[20:] + "\n")

    assert reading.poll().reward_mean == [0.1, 0.5]


def test_damaged_lines_of_events_are_counted_and_named(campaign: SyntheticCampaign) -> None:
    running(campaign).step(1)
    with (campaign.directory.events / "000-train-0.jsonl").open("ab") as file:
        file.write(b"{\n[1]\n\x00\n")
    reading = collector(campaign)
    assert reading.poll().detail.problems == ["3 lines of events/000-train-0.jsonl are damaged"]
    assert reading.poll().detail.problems == ["3 lines of events/000-train-0.jsonl are damaged"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x00\xff\xfe",
        b"[" * 100_000,
        b"[1, 2]",
        b"null",
        b'{"event": "step"}',
        b'{"time": "now", "event": "step", "step": 5}',
        b'{"time": NaN, "event": "step", "step": 5}',
        b'{"time": 1, "event": "step", "step": -5}',
        b'{"time": 1, "event": "step", "step": 1e400}',
        b'{"time": 1, "event": "step", "step": 99999999999999999999999999}',
        b'{"time": 1, "event": "episodes", "done": "many", "worker": "w"}',
        b'{"time": 1, "event": "unknown"}',
        b'{"time": 1, "event": 7}',
        b'{"time": 1, "event": "worker-started", "worker": null}',
        b'{"time": 1, "event": "step", "step": 5, "job": "zero"}',
    ],
)
def test_an_invalid_line_changes_nothing(campaign: SyntheticCampaign, line: bytes) -> None:
    running(campaign).step(1)
    (campaign.directory.events / "foreign.jsonl").write_bytes(line + b"\n")

    snapshot = collector(campaign).poll()

    encode_snapshot(snapshot)
    assert (snapshot.step, snapshot.version, snapshot.episodes.done) == (1, 1, 0)


def test_a_reward_that_is_not_a_number_is_null_in_the_series(campaign: SyntheticCampaign) -> None:
    running(campaign).step(1, reward=math.nan)
    campaign.step(2)

    assert json.loads(encode_snapshot(collector(campaign).poll()))["reward_mean"] == [None, 0.2]


@pytest.mark.parametrize("name", ["manifest", "recipe", "plan"])
@pytest.mark.parametrize("content", [b"", b'{"name": ', b"\xff\xff", b"[]", b"[" * 100_000, b'{"name": 5}'])
def test_a_broken_description_is_reported_and_the_rest_is_shown(
    campaign: SyntheticCampaign, name: str, content: bytes
) -> None:
    running(campaign).step(1)
    path = getattr(campaign.directory, name)
    if content == b'{"name": 5}' and name == "plan":
        content = b'{"roles": 5}'
    path.write_bytes(content)

    snapshot = collector(campaign).poll()

    assert snapshot.step == 1
    assert any(problem.startswith(f"{path.name} cannot be read") for problem in snapshot.detail.problems)


def test_broken_job_files_are_reported_and_the_rest_is_shown(campaign: SyntheticCampaign) -> None:
    running(campaign)
    campaign.directory.job(0).outcome.write_bytes(b'{"outcome"')
    campaign.submit(1)
    campaign.directory.job(1).submission.write_bytes(b"")
    for name in ("notes.txt", "²", "7"):
        (campaign.directory.jobs / name).write_text("no job")

    snapshot = collector(campaign).poll()

    assert [job.number for job in snapshot.jobs] == [0]
    problems = {problem.split()[0] for problem in snapshot.detail.problems}
    assert problems == {"jobs/000/outcome.json", "jobs/001/submitted.json", "jobs/7/submitted.json"}


@pytest.mark.parametrize("slurm", [None, "completed"])
def test_the_reason_of_a_job_whose_outcome_cannot_be_read_is_that_file(slurm: str | None) -> None:
    facts = JobFacts(guardian_alive=False, slurm=slurm, damage="jobs/000/outcome.json cannot be read: x", saved_step=4)
    state, reason = derive_job_state(facts)
    assert state == "failed"
    assert reason == "jobs/000/outcome.json cannot be read: x; `hpcrl resume` continues from step 4"


def test_a_submission_that_cannot_be_read_is_not_a_lost_job(campaign: SyntheticCampaign) -> None:
    running(campaign).segment("scored", 0, 3)
    campaign.directory.job(0).submission.write_text("[]")
    assert "has results, and jobs/000/submitted.json cannot be read" in describe_lost_jobs(campaign.directory)


def test_foreign_files_everywhere_do_no_harm(campaign: SyntheticCampaign) -> None:
    running(campaign).step(1)
    (campaign.directory.events / "directory.jsonl").mkdir()
    (campaign.directory.events / "dangling.jsonl").symlink_to("nowhere")
    (campaign.directory.events / "loop.jsonl").symlink_to("loop.jsonl")
    os.mkfifo(campaign.directory.events / "pipe.jsonl")
    (campaign.directory.spool("rollouts") / "foreign.h5").touch()
    campaign.segment("rollouts", 0, 3)

    snapshot = collector(campaign).poll()

    assert snapshot.step == 1
    assert snapshot.spools[0].depth == 3
    assert {problem.split()[0] for problem in snapshot.detail.problems} == {"dangling.jsonl", "loop.jsonl"}


def test_unreadable_files_are_reported_and_the_rest_is_shown(campaign: SyntheticCampaign, tmp_path: Path) -> None:
    running(campaign).step(1)
    closed = [
        campaign.directory.recipe,
        campaign.directory.spool("scored"),
        campaign.directory.events / "000-train-0.jsonl",
    ]
    with as_another_user(tmp_path, closed):
        snapshot = collector(campaign).poll()

    assert snapshot.state == "running"
    problems = " ".join(snapshot.detail.problems)
    assert all(word in problems for word in ("recipe.json", "spool scored", "000-train-0.jsonl"))


@pytest.mark.parametrize("folder", ["jobs", "events"])
def test_an_unreadable_folder_is_reported_and_the_rest_is_shown(
    campaign: SyntheticCampaign, tmp_path: Path, folder: str
) -> None:
    running(campaign).step(1)
    with as_another_user(tmp_path, [campaign.directory.root / folder]):
        snapshot = collector(campaign).poll()

    assert snapshot.name == "quickstart-1"
    assert [problem for problem in snapshot.detail.problems if problem.startswith(f"{folder}/ cannot be read")]


@contextlib.contextmanager
def as_another_user(top: Path, closed: list[Path]) -> Iterator[None]:
    """Make `closed` unreadable; root, which may read everything, opens the rest and switches to user nobody."""
    root = os.geteuid() == 0
    above = [parent for parent in (top, *top.parents) if Path(tempfile.gettempdir()) in parent.parents]
    paths = [*above, *top.rglob("*")] if root else closed
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    for path, mode in modes.items():
        path.chmod(0o000 if path in closed else mode | 0o755)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


def test_an_evaluation_that_is_reported_twice_counts_once(campaign: SyntheticCampaign) -> None:
    running(campaign)
    for number, version, mean in ((0, 0, 0.1), (1, 50, 0.4), (1, 50, 0.4), (2, 100, None)):
        campaign.emit("env-0", EvaluationFinished(number=number, version=version, reward_mean=mean, num_episodes=8))
    snapshot = collector(campaign).poll()
    assert [(one.version, one.reward_mean) for one in snapshot.evaluations] == [(0, 0.1), (50, 0.4), (100, None)]
    notes = [note.text for note in snapshot.detail.notes if "evaluation" in note.text]
    assert len(notes) == 3
    assert notes[1] == "evaluation of version 50: mean reward 0.400 in 8 episodes"
    assert "not one" in notes[2]


def test_episodes_without_a_reward_are_counted_among_the_faults(campaign: SyntheticCampaign) -> None:
    running(campaign).emit(
        "env-0", EpisodesCounted(done=5, truncated=2, outcomes={"lake": {"finished": 5, "overflow": 2}})
    )
    campaign.emit(
        "reward-0", SegmentScored(rewards={"lake": [1.0]}, reward_faults={"lake": {"finished": 3, "overflow": 1}})
    )

    snapshot = collector(campaign).poll()

    assert (snapshot.episodes.num_kept, snapshot.episodes.faulted) == (3, 4)
    assert snapshot.accounts["env_fault"] == 4
    assert snapshot.domains["lake"].outcomes == {"env-fault": 4, "finished": 2, "overflow": 1}


def test_advisories_are_found_again_when_time_has_passed(campaign: SyntheticCampaign) -> None:
    watched = collector(running(campaign))
    assert watched.poll().advisories == []
    campaign.emit("env-0", EpisodesCounted(outcomes={"lake": {"env-fault": 20}}))
    campaign.now += 2.0
    assert [advisory.name for advisory in watched.poll().advisories] == ["domain-fails"]


def test_an_ended_campaign_without_its_events_is_not_all_there(campaign: SyntheticCampaign) -> None:
    running(campaign)
    assert collector(campaign).poll().detail.problems == []
    campaign.outcome("done", "every training step was made")
    shutil.rmtree(campaign.directory.events)
    assert collector(campaign).poll().detail.problems == ["events/ is missing: what the campaign did is not known"]


def save_checkpoint(campaign: SyntheticCampaign, step: int) -> None:
    (campaign.directory.checkpoints / f"000001-step-{step:06d}").mkdir(parents=True)


def test_events_that_end_before_a_checkpoint_are_a_problem_once_the_campaign_has_ended(
    campaign: SyntheticCampaign,
) -> None:
    running(campaign).step(1)
    save_checkpoint(campaign, 10)
    (campaign.directory.checkpoints / "000001-step-000010-copy.2").mkdir()
    watched = collector(campaign)
    assert watched.poll().detail.problems == []  # of a job that runs, a file system may show its events later
    campaign.outcome("done", "every training step was made")
    reason = "events/ lacks steps: it ends at step 1, and a checkpoint is of step 10"
    assert watched.poll().detail.problems == [reason]
    assert collector(campaign).poll().detail.problems == [reason]
    (campaign.directory.events / "000-train-0.jsonl").unlink()
    reason = "events/ lacks steps: it has none, and a checkpoint is of step 10"
    assert collector(campaign).poll().detail.problems == [reason]


def test_steps_that_a_resume_took_back_are_not_lost(campaign: SyntheticCampaign) -> None:
    running(campaign).step(10)
    save_checkpoint(campaign, 10)
    campaign.emit("train-0", TrainingResumed(step=5, version=5, checkpoint="000000-step-000005"))
    campaign.step(6)
    campaign.outcome("stopped")
    assert collector(campaign).poll().detail.problems == []


def test_steps_that_were_written_after_the_look_are_not_lost(campaign: SyntheticCampaign) -> None:
    """Slurm reports the end of a job after its events were read."""
    running(campaign).step(1)

    def query(ids: Sequence[str]) -> dict[str, JobStatus]:
        campaign.step(2)
        save_checkpoint(campaign, 2)
        campaign.now += 60
        return {job: JobStatus(id=job, state="node_fail") for job in ids}

    snapshot = SnapshotCollector(campaign.directory, query=query, clock=lambda: campaign.now + 60).poll()
    assert (snapshot.state, snapshot.step, snapshot.detail.problems) == ("failed", 2, [])


def test_a_campaign_with_results_and_no_job_is_unknown_with_the_reason(campaign: SyntheticCampaign) -> None:
    running(campaign).step(1)
    save_checkpoint(campaign, 1)
    campaign.outcome("done", "every training step was made")
    shutil.rmtree(campaign.directory.jobs)
    snapshot = collector(campaign).poll()
    (line,) = survey_campaigns([campaign.directory], problems=[])
    restore = f"restore {campaign.directory.jobs}"
    reason = f"campaign 'quickstart-1' has results, and the records of its jobs are gone: {restore}"
    assert (snapshot.state, snapshot.detail.reason) == (line.state, line.reason) == ("unknown", reason)
    campaign.directory.stop.touch()
    assert collector(campaign).poll().state == "unknown"


def test_a_campaign_with_results_whose_jobs_may_not_be_read_is_unknown(
    campaign: SyntheticCampaign, tmp_path: Path
) -> None:
    running(campaign).step(1)
    save_checkpoint(campaign, 1)
    with as_another_user(tmp_path, [campaign.directory.jobs]):
        snapshot = collector(campaign).poll()
    reason = "campaign 'quickstart-1' has results, and jobs/ cannot be read: Permission denied"
    assert (snapshot.state, snapshot.detail.reason) == ("unknown", reason)


def test_the_load_of_a_role_is_that_of_all_its_engines(campaign: SyntheticCampaign) -> None:
    running(campaign)
    for worker, share, num in (("decode-0", 0.2, 30), ("decode-1", 0.6, 50)):
        load = {"busy_share": share + 0.1, "waiting": num / 10, "kv_share": share, "num_tokens": num, "version": num}
        campaign.emit(worker, EngineCounted(window_s=10.0, **load))

    role = collector(campaign).poll().roles["decode"]

    assert (role.busy_share, role.queue, role.tokens_per_s) == (0.5, 8, 8.0)
    assert (role.kv_share, role.version) == (0.4, 30)


def test_a_job_that_slurm_no_longer_knows_has_ended_if_a_later_one_has(campaign: SyntheticCampaign) -> None:
    """As of a driver that was killed, once accounting is purged or the cluster is gone; one with heartbeats runs."""
    campaign.submit(0, job="1")
    campaign.submit(1, job="2")
    campaign.start(workers=1)
    ask = RecordedQueries(text="")
    assert collector(campaign, ask).poll().state == "running"
    campaign.now += 3600
    assert collector(campaign, ask).poll().state == "unknown"
    campaign.outcome("stopped", "a user asked it to end", number=1)
    ended = collector(campaign, ask).poll()
    assert ended.state == "stopped"
    assert [job.state for job in ended.jobs] == ["failed", "stopped"]
    assert ended.jobs[0].reason.startswith("it ended without an outcome; no answer")
