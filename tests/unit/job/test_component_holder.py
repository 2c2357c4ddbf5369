"""The jobs of components and the driver's job meet: each side with fakes of Slurm's commands on PATH."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign import submission
from hpcrl.campaign.request import load_request
from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.job import component_holder
from hpcrl.job.component_holder import ComponentHolder, await_components
from hpcrl.job.guardian import release_components
from hpcrl.job.supervision import EndRequests
from hpcrl.plan.records import read_plan
from hpcrl.slurm.component_jobs import ComponentLease, read_lease
from hpcrl.slurm.submit import SubmittedJob, record_submission
from hpcrl.system.files import make_private_dir, publish_file, remove_path
from tests.support.campaigns import until


@pytest.fixture
def job(home: Path, tmp_path: Path) -> JobDir:
    """A job with an env, a decode and a train component, of which the latter two are jobs 101 and 102."""
    settings = ("job.layout=multi-job", "resources.prefill.num_workers=0")
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    submission.write_description(campaign, load_request("quickstart", site="lab", settings=settings))
    job = submission.claim_job(campaign, 0)
    publish_file(job.component_jobs, "101\n102\n")
    publish_file(job.terminated, "")
    return job


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes: squeue prints a file, scontrol records its calls; the process is in job 101, on two nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"squeue": f"cat {folder}/queue", "scontrol": f'echo "$@" >> {folder}/calls', "sacct": "true"}
    for name, program in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{program}\n")
        (folder / name).chmod(0o700)
    (folder / "queue").write_text(list_states("100 RUNNING"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    return folder


def submitted(job: JobDir) -> None:
    record_submission(SubmittedJob(id="100", scheduler="slurm", time=time.time()), job=job)


def start(job: JobDir) -> "subprocess.Popen[bytes]":
    """Start the program of component 1's job."""
    command = [sys.executable, "-m", "hpcrl.job.component_holder", str(job.campaign.root), str(job.number), "1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_job_holds_its_nodes_until_the_driver_has_recorded_the_outcome(job: JobDir, slurm: Path) -> None:
    submitted(job)
    holder = start(job)
    until(job.component_lease(1).exists, what="there is a lease")
    lease = read_lease(job, 1)
    assert lease is not None
    assert (lease.slurm_id, lease.nodes) == ("101", ["gpu1", "gpu2"])
    make_private_dir(job.parsl)  # there is a driver
    holder.send_signal(signal.SIGTERM)
    until(lambda: bool(job.terminated.read_text()), what="there is a notice of SIGTERM")
    assert holder.poll() is None, "the driver decides what is still possible"
    publish_file(job.outcome, JobEnd(outcome="drained", time=time.time()).encode())
    printed, _ = holder.communicate(timeout=60)
    assert (holder.returncode, b"the driver's job has ended" in printed) == (0, True)
    assert not job.component_lease(1).exists()


def test_without_a_driver_sigterm_ends_a_job(job: JobDir, slurm: Path) -> None:
    holder = start(job)
    until(job.component_lease(1).exists, what="there is a lease")
    holder.send_signal(signal.SIGTERM)
    printed, _ = holder.communicate(timeout=60)
    assert b"it received SIGTERM before the driver has started" in printed
    assert not job.terminated.read_text()


@pytest.mark.parametrize("queue", ["77 RUNNING", "100 CANCELLED"])
def test_a_job_whose_driver_is_gone_ends_after_several_answers(
    job: JobDir, slurm: Path, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    submitted(job)
    monkeypatch.setattr(component_holder, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(component_holder, "POLL_INTERVAL_S", 0.01)
    (slurm / "squeue").write_text(f"#!/bin/sh\necho >> {slurm}/calls\ncat {slurm}/queue\n")
    (slurm / "queue").write_text(list_states(queue))
    assert ComponentHolder(job, 1).hold(max_wait_s=60) == "the driver's job is gone"
    assert len((slurm / "calls").read_text()) == component_holder.NUM_ABSENT


@pytest.mark.parametrize("state", ["SUSPENDED", "CONFIGURING", "COMPLETING"])
def test_a_driver_that_has_nodes_is_not_queued(job: JobDir, slurm: Path, state: str) -> None:
    submitted(job)
    (slurm / "queue").write_text(list_states(f"100 {state}"))
    assert ComponentHolder(job, 1)._find_end(0.0) is None
    assert not (slurm / "calls").exists()


def test_a_driver_that_has_run_is_not_waited_for(job: JobDir, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(job)
    monkeypatch.setattr(component_holder, "LOOK_INTERVAL_S", 0.0)
    holder = ComponentHolder(job, 1)
    assert holder._find_end(0.0) is None
    (slurm / "queue").write_text(list_states("100 PENDING"))
    assert holder._find_end(0.0) is None, "Slurm has queued it again: then the driver is over soon"


def test_a_record_that_cannot_be_read_is_not_missing(job: JobDir, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component_holder, "SUBMISSION_TIMEOUT_S", 0.0)
    monkeypatch.setattr(component_holder, "LOOK_INTERVAL_S", 0.0)
    holder = ComponentHolder(job, 1)
    publish_file(job.submission, "{")
    assert holder._find_end(60.0) is None
    job.submission.unlink()
    assert holder._find_end(60.0) == "no driver's job was submitted"


def test_a_job_whose_campaign_was_removed_ends(job: JobDir, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component_holder, "LOOK_INTERVAL_S", 0.0)
    holder = start_in_thread(job)
    remove_path(job.campaign.root)
    assert holder() == "its campaign was removed"


def start_in_thread(job: JobDir) -> Callable[[], str]:
    """Hold in a thread once there is a lease; return what waits for the end and returns its reason."""
    import threading

    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(ComponentHolder(job, 1).hold(max_wait_s=60)))
    thread.start()
    until(job.component_lease(1).exists, what="there is a lease")

    def join() -> str:
        thread.join(60)
        return reasons[0]

    return join


def test_a_slurm_that_does_not_answer_ends_nothing(job: JobDir, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(job)
    (slurm / "squeue").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(component_holder, "LOOK_INTERVAL_S", 0.0)
    holder = start_in_thread(job)
    time.sleep(3 * component_holder.POLL_INTERVAL_S)
    assert job.component_lease(1).exists()
    publish_file(job.outcome, JobEnd(outcome="done").encode())
    assert holder() == "the driver's job has ended"


def test_a_job_that_starts_long_before_the_driver_is_queued_again(job: JobDir, slurm: Path) -> None:
    submitted(job)
    (slurm / "queue").write_text(list_states("100 PENDING"))
    assert "has not started" in ComponentHolder(job, 1).hold(max_wait_s=0.0)
    assert (slurm / "calls").read_text() == "requeuehold 101\n"
    assert not job.component_lease(1).exists(), "the driver must not use its nodes"


def leased(job: JobDir, *indices: int) -> None:
    for index in indices:
        lease = ComponentLease(slurm_id=str(100 + index), nodes=[f"n{index}"], time=time.time())
        publish_file(job.component_lease(index), msgspec.json.encode(lease))


def list_component_states(**states: str) -> str:
    """Return squeue's rows of the jobs of components, as `c1="RUNNING"`."""
    return list_states(*(f"{100 + int(name[1:])} {state}" for name, state in states.items()))


def list_states(*jobs: str) -> str:
    """Return squeue's rows of jobs, given as `100 RUNNING` or `100 RUNNING n1`."""
    rows = ((*job.split(), "")[:3] for job in jobs)
    return "".join(f"{id}|{id}|{state}|gpu|N/A|N/A|{nodes}|Priority\n" for id, state, nodes in rows)


def wait(job: JobDir) -> JobEnd | None:
    requests = EndRequests(job.campaign.stop, job.terminated)
    return await_components(job, read_plan(job.campaign), requests=requests, note_turn=lambda: None)


def test_the_driver_starts_once_all_components_have_nodes(job: JobDir, slurm: Path) -> None:
    leased(job, 1, 2)
    (slurm / "queue").write_text(list_component_states(c1="RUNNING", c2="RUNNING"))
    assert wait(job) is None


def test_a_lease_of_a_job_that_waits_again_does_not_count(
    job: JobDir, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component_holder, "MAX_WAIT_SHARE", 0.0)
    leased(job, 1, 2)
    (slurm / "queue").write_text(list_component_states(c1="RUNNING", c2="PENDING"))
    end = wait(job)
    assert end is not None
    assert (end.outcome, end.cause) == ("failed", "missing-nodes")
    assert "the jobs of train (partition prefill) did not start" in end.reason


def test_a_lease_with_other_nodes_is_of_an_earlier_start(
    job: JobDir, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component_holder, "MAX_WAIT_SHARE", 0.0)
    leased(job, 1, 2)
    (slurm / "queue").write_text(list_states("101 RUNNING n1", "102 RUNNING n9"))
    end = wait(job)
    assert end is not None
    assert "the jobs of train" in end.reason
    (slurm / "queue").write_text(list_states("101 RUNNING n1", "102 RUNNING n2"))
    assert wait(job) is None


def test_a_job_that_held_itself_back_is_released(job: JobDir, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component_holder, "MAX_WAIT_SHARE", 0.0)
    leased(job, 1)
    (slurm / "queue").write_text(list_states("101 RUNNING", "102 PENDING"))
    assert wait(job) is not None
    assert (slurm / "calls").read_text() == "release 102\n"


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED", "NODE_FAIL"])
def test_the_driver_does_not_wait_for_a_job_that_has_ended(job: JobDir, slurm: Path, state: str) -> None:
    leased(job, 2)
    (slurm / "queue").write_text(list_component_states(c1=state, c2="RUNNING"))
    end = wait(job)
    assert end is not None
    assert (end.outcome, end.cause) == ("failed", "missing-nodes")
    assert f"the jobs of decode ({state.lower()}) ended" in end.reason


def test_a_driver_that_waits_ends_when_a_user_or_slurm_asks_for_it(job: JobDir, slurm: Path) -> None:
    (slurm / "queue").write_text(list_component_states(c1="PENDING", c2="PENDING"))
    publish_file(job.terminated, "n1")
    cut = wait(job)
    publish_file(job.campaign.stop, "")
    stopped = wait(job)
    assert cut is not None
    assert stopped is not None
    assert (cut.outcome, cut.cause) == ("cut", "cancellation")
    assert (stopped.outcome, stopped.cause) == ("stopped", "user-request")


def test_a_campaign_of_another_layout_waits_for_nothing(home: Path, tmp_path: Path) -> None:
    campaign = CampaignDir(make_private_dir(tmp_path / "d"))
    submission.write_description(campaign, load_request("quickstart", site="lab"))
    assert wait(submission.claim_job(campaign, 0)) is None


def test_jobs_that_have_given_their_lease_back_end_before_those_that_are_left_are_cancelled(
    job: JobDir, slurm: Path
) -> None:
    rest = 'test $(grep -c squeue "$0.calls") -gt 2 && exit; echo "101 RUNNING\n102 COMPLETING"'
    for name, program in (("squeue", rest), ("scancel", "true")):
        (slurm / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {slurm}/squeue.calls\n{program}\n')
        (slurm / name).chmod(0o700)
    release_components(job)
    made = [row.split()[0] for row in (slurm / "squeue.calls").read_text().splitlines()]
    assert made == ["squeue", "squeue", "squeue", "scancel"]
