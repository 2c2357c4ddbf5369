"""The guardian records the outcome of its driver; a driver whose guardian was killed records its own."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import pytest

from hpcrl.campaign_dir.job_end import EndCause, JobEnd, read_job_end
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.config.site import load_site
from hpcrl.job import driver_pulse, guardian
from hpcrl.job.driver_pulse import DriverPulse, waits_for_storage
from hpcrl.plan.plan import make_plan
from hpcrl.plan.records import read_plan
from hpcrl.system.files import make_private_dir, publish_file, read_json
from hpcrl.system.processes import read_start_ticks
from hpcrl.testing.faulty_disk import FaultyDisk
from tests.support.campaigns import until
from tests.support.plans import make_recipe

PROGRAM = """
import signal, sys
from pathlib import Path
from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.job import guardian
from hpcrl.job.guardian import run_guarded, send_outcome

guardian.CLOSE_GRACE_S = 1.0
campaign = CampaignDir(Path(sys.argv[1]))
place = WorkerPlace(campaign.job(0), "node0")

def drive(outcome_fd, pulse):
    ends = [signal.SIGTERM, signal.SIGUSR2]
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    print("ready", flush=True)
    signal.sigwait(ends)
    send_outcome(JobEnd(outcome="drained", cause="cancellation"), outcome_fd=outcome_fd, job=place.job)
    return 0

sys.exit(run_guarded(drive, place))
"""


def end_guardian(tmp_path: Path, sig: signal.Signals) -> CampaignDir:
    """Start a guardian with a driver, and send the guardian a signal."""
    campaign = CampaignDir(tmp_path)
    make_private_dir(campaign.job(0).root)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as guardian:
        assert guardian.stdout is not None
        assert guardian.stdout.readline() == b"ready\n"
        os.kill(guardian.pid, sig)
    return campaign


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_the_outcome_of_a_driver_that_drains_after_a_signal_is_recorded(tmp_path: Path, number: signal.Signals) -> None:
    """Both warnings drain it, though SIGUSR1 makes a driver write its stacks."""
    campaign = end_guardian(tmp_path, number)
    assert read_json(campaign.job(0).outcome)["outcome"] == "drained"


def test_a_driver_whose_guardian_was_killed_records_its_own_outcome(tmp_path: Path) -> None:
    job = end_guardian(tmp_path, signal.SIGKILL).job(0)
    until(job.outcome.exists, what="the driver records its outcome", timeout_s=30)
    assert (read_json(job.outcome)["outcome"], job.end.exists()) == ("drained", True)


ORPHAN = """
import subprocess
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True).pid, flush=True)
"""
ORPHAN_PROGRAM = PROGRAM.replace(
    'print("ready", flush=True)', f"import subprocess; subprocess.run([sys.executable, '-c', {ORPHAN!r}])"
)
"""The same with a process whose parent, in another session, has ended."""


def test_orphans_of_steps_are_ended_by_a_driver_whose_guardian_was_killed(tmp_path: Path) -> None:
    job = CampaignDir(tmp_path).job(0)
    make_private_dir(job.root)
    with subprocess.Popen([sys.executable, "-c", ORPHAN_PROGRAM, str(tmp_path)], stdout=subprocess.PIPE) as guardian:
        assert guardian.stdout is not None
        orphan = int(guardian.stdout.readline())
        guardian.kill()
    until(job.outcome.exists, what="the driver records its outcome", timeout_s=30)
    assert read_start_ticks(orphan) is None


HUNG_PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import load_site
from hpcrl.job import driver_pulse, guardian
from hpcrl.plan.plan import make_plan
from hpcrl.plan.records import read_plan

driver_pulse.MAX_SILENCE_S = guardian.MAX_SILENCE_S = 2.0
driver_pulse.SUSPICION_S, driver_pulse.MAX_TURN_S, driver_pulse.MAX_WAIT_S = 1.0, 2.0, 15.0
driver_pulse.PROBE_INTERVAL_S, driver_pulse.MAX_ANSWER_S = 0.1, 0.5
guardian.STACKS_GRACE_S, guardian.CLOSE_GRACE_S = 0.5, 1.0
place = WorkerPlace(CampaignDir(Path(sys.argv[1])).job(0), "node0")

def hang_in_one_place():
    time.sleep(600)

def stop_or_hang():
    if sys.argv[2] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    hang_in_one_place()

def drive(outcome_fd, pulse):
    print(subprocess.Popen(["sleep", "600"]).pid, os.getpid(), flush=True)
    if sys.argv[2] == "work":
        sys.stdin.readline()
        for _ in range(40):
            pulse.note_turn()
            time.sleep(0.05)
        guardian.send_outcome(guardian.JobEnd(outcome="drained"), outcome_fd=outcome_fd, job=place.job)
        return 0
    if sys.argv[2] not in ("stop", "start"):
        pulse.note_turn()
    if sys.argv[2] != "start":
        pulse.note_start()
    stop_or_hang()

sys.exit(guardian.run_guarded(drive, place))
"""


def run_hung(tmp_path: Path, how: str, *, environ: Mapping[str, str] = MappingProxyType({})) -> tuple[JobEnd, str, int]:
    """Run a driver that hangs; return the recorded end, the batch log, and the pid of a process that it has started."""
    job = CampaignDir(tmp_path).job(0)
    make_private_dir(job.root)
    command = [sys.executable, "-c", HUNG_PROGRAM, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | dict(environ))
    assert done.returncode == 1
    end = read_job_end(job)
    assert end is not None
    assert job.dump_stacks.exists(), "all workers write their stacks"
    return end, done.stderr, int(done.stdout.split()[0])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("stop", "has stood still for 2 s"),
        ("hang", "has waited for one thing for 3 s"),
        ("start", "has waited for one thing for 15 s"),
    ],
)
def test_a_driver_that_hangs_is_ended_with_its_processes_and_its_stacks_are_kept(
    tmp_path: Path, how: str, reason: str
) -> None:
    end, log, started = run_hung(tmp_path, how)
    cause = "not-started" if how == "start" else "infrastructure"
    assert (end.outcome, end.cause, reason in end.reason) == ("failed", cause, True)
    assert "in stop_or_hang" in log
    assert read_start_ticks(started) is None, "what it had started was ended too"


def test_a_driver_that_no_signal_ends_waits_for_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread is in state D, which cannot be had here without a file system that is away."""
    for name, value in (("SUSPICION_S", 0.0), ("MAX_TURN_S", 0.2)):
        monkeypatch.setattr(driver_pulse, name, value)
    waits = [True]
    monkeypatch.setattr(driver_pulse, "waits_for_storage", lambda _: waits[0])
    pulse = DriverPulse(tmp_path)
    pulse.note_turn()
    pulse._write()
    for _ in range(5):
        assert pulse.describe_hang(os.getpid(), since=0.0) is None
        time.sleep(0.1)
    waits[0] = False
    time.sleep(0.3)
    assert "has waited for one thing" in str(pulse.describe_hang(os.getpid(), since=0.0))


def test_a_process_that_sleeps_does_not_wait_for_storage() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        assert not waits_for_storage(sleeper.pid)
        sleeper.kill()
    assert not waits_for_storage(sleeper.pid)


@pytest.mark.parametrize("lag_ms", [-1, 0])
def test_a_driver_has_longer_while_the_file_system_does_not_answer(tmp_path: Path, lag_ms: int) -> None:
    disk = FaultyDisk.build(tmp_path / "c", directory=tmp_path)
    if disk is None:
        pytest.skip("no C compiler")
    (tmp_path / "c").mkdir()
    with ThreadPoolExecutor() as threads:
        with disk.fail_calls(errno.EIO, kinds="w", lag_ms=lag_ms):
            done = threads.submit(run_hung, tmp_path / "c", "hang", environ=disk.environ)
            time.sleep(13.0)  # longer than a turn that only waits, and a slow start
        end, _, _ = done.result()
    assert re.search(r"has waited for one thing for ([5-9]|1\d) s", end.reason), end.reason


def test_a_job_that_stood_still_as_a_whole_continues(tmp_path: Path) -> None:
    job = CampaignDir(tmp_path).job(0)
    make_private_dir(job.root)
    command = [sys.executable, "-c", HUNG_PROGRAM, str(tmp_path), "work"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guardian:
        assert guardian.stdout is not None
        assert guardian.stdin is not None
        driver = int(guardian.stdout.readline().split()[1])
        for sig in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(guardian.pid, sig)
            os.kill(driver, sig)
            if sig == signal.SIGSTOP:
                time.sleep(3.0)  # longer than a driver may stand still
        guardian.stdin.write("work\n")
        guardian.stdin.flush()
        assert guardian.wait(60) == 0
    end = read_job_end(job)
    assert end is not None
    assert end == JobEnd(outcome="drained", time=end.time, run_s=end.run_s)


FULL_DISK = """
import errno, os, sys
from pathlib import Path
from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import load_site
from hpcrl.job import guardian
from hpcrl.plan.plan import make_plan
from hpcrl.plan.records import read_plan

def refuse(path, data):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

guardian.publish_file = refuse
guardian.OUTCOME_TIMEOUT_S = 0.1
guardian.unlink_recorded_windows = lambda job: print("windows", flush=True)
job = CampaignDir(Path(sys.argv[1])).job(0)
guardian._clean_up(job, grace_s=0.1, tasks=guardian.EndTasks(limit_s=5.0))
guardian._publish_outcome(job, JobEnd(outcome="drained", cause="walltime").encode())
"""


def test_on_a_full_disk_everything_is_cleaned_up_and_the_outcome_is_in_the_batch_log(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "windows\n"
    assert "Disk quota exceeded" in done.stderr
    assert 'the outcome is {"outcome":"drained"' in done.stderr


def test_a_batch_log_on_the_full_disk_keeps_nothing_from_being_cleaned_up(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as log:
        command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False, timeout=60)
    assert done.stdout == "windows\n"


HANGING_END = PROGRAM.replace(
    "guardian.CLOSE_GRACE_S = 1.0", "guardian.CLOSE_GRACE_S, guardian.MAX_END_S, guardian.MIN_TASK_S = 1.0, 2.0, 0.1"
).replace('print("ready", flush=True)', 'import subprocess; print(subprocess.Popen(["sleep", "600"]).pid, flush=True)')
"""A driver that leaves a process, and a guardian with little patience."""


def test_a_file_system_that_hangs_at_the_end_keeps_no_process_and_no_guardian(tmp_path: Path) -> None:
    job = CampaignDir(tmp_path / "c").job(0)
    make_private_dir(job.root)
    disk = FaultyDisk.build(job.campaign.root, directory=tmp_path)
    if disk is None:
        pytest.skip("no C compiler: the file system of this test cannot be made to hang")
    command = [sys.executable, "-c", HANGING_END, str(job.campaign.root)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | disk.environ) as guardian,
        disk.fail_calls(0, lag_ms=-1),
    ):
        assert guardian.stdout is not None
        left = int(guardian.stdout.readline())
        os.kill(guardian.pid, signal.SIGUSR2)
        assert guardian.wait(60) == 0
    assert read_start_ticks(left) is None
    assert not job.outcome.exists(), "it could not be recorded"


STRANGER = PROGRAM.replace(
    'print("ready", flush=True)',
    'import subprocess; print(subprocess.Popen(["sleep", "600"], user=65534, pass_fds=[outcome_fd]).pid, flush=True)',
).replace("CLOSE_GRACE_S = 1.0", "CLOSE_GRACE_S = 0.1; from hpcrl.system import processes; processes.MAX_KILL_S = 0.5")
"""A driver that leaves a process of another user, which has its pipe to the guardian."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another user")
def test_a_process_that_cannot_be_ended_does_not_keep_the_guardian(tmp_path: Path) -> None:
    job = CampaignDir(tmp_path).job(0)
    make_private_dir(job.root)
    command = ["setpriv", "--bounding-set=-kill", sys.executable, "-c", STRANGER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as guardian:
        assert guardian.stdout is not None
        left = int(guardian.stdout.readline())
        try:
            os.kill(guardian.pid, signal.SIGUSR2)
            assert guardian.wait(60) == 0
        finally:
            os.kill(left, signal.SIGKILL)
    assert read_json(job.outcome)["outcome"] == "drained"


def test_a_record_that_is_no_outcome_counts_as_none(tmp_path: Path) -> None:
    job = CampaignDir(tmp_path).job(0)
    make_private_dir(job.root)
    garbage = PROGRAM.replace("    signal.sigwait(ends)", "    os.write(outcome_fd, b'{'); os._exit(3)")
    program = f"import os\n{garbage}"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 3
    assert read_json(job.outcome)["reason"] == "the driver ended with code 3"


@pytest.mark.parametrize(
    ("cause", "cancelled"), [("cancellation", False), ("infrastructure", False), ("user-code", True)]
)
def test_the_next_job_stays_where_slurm_may_know_more_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: EndCause, cancelled: bool
) -> None:
    calls: list[JobDir] = []
    monkeypatch.setattr(guardian.next_job, "campaign_outcome", lambda _: ("failed", "so it is"))
    monkeypatch.setattr(guardian.next_job, "cancel_next_jobs", calls.append)
    job = CampaignDir(tmp_path).job(0)
    make_private_dir(job.root)
    end = JobEnd(outcome="failed", cause=cause)
    guardian._record_end(job, end, tasks=guardian.EndTasks(limit_s=5.0))
    assert bool(calls) == cancelled
    job.campaign.stop.touch()
    guardian._record_end(job, end, tasks=guardian.EndTasks(limit_s=5.0))
    assert calls[-1:] == [job], "a user has asked for the end"


SRUN = """#!/bin/sh
echo "$@" >> {folder}/calls
while [ "$1" != "-m" ]; do python=$1; shift; done
exec "$python" "$@"
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake srun that runs the command of its step here; returns the record of its calls."""
    program = make_private_dir(tmp_path / "bin") / "srun"
    program.write_text(SRUN.format(folder=program.parent))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program.parent / "calls"


def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """Make a het job that has left a window on this node."""
    campaign = CampaignDir(tmp_path / "c")
    job = campaign.job(0)
    make_private_dir(job.windows)
    plan = make_plan(make_recipe(), load_site("lab"))
    publish_file(campaign.plan, plan.to_json())
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for part in plan.components:
        names = ",".join(f"{part.partition}{number}" for number in range(part.nodes))
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{part.index}", names)
    window = tmp_path / "window"
    window.touch(mode=0o600)
    (job.windows / "window").write_text(str(window))
    return job


def test_the_last_sweep_removes_what_killed_steps_have_left_on_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: Path
) -> None:
    job = make_job(tmp_path, monkeypatch)
    guardian.sweep_nodes(job)
    assert not (tmp_path / "window").exists()
    (call,) = srun.read_text().splitlines()
    num = len(read_plan(job.campaign).components)
    assert call.startswith(f"--het-group={','.join(map(str, range(num)))} --ntasks-per-node=1 ")


def test_the_last_sweep_leaves_out_nodes_that_slurm_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: Path
) -> None:
    job = make_job(tmp_path, monkeypatch)
    first = read_plan(job.campaign).components[0]
    (srun.parent / "sinfo").write_text(f"#!/bin/sh\necho {first.partition}0 down*\necho other idle\n")
    (srun.parent / "sinfo").chmod(0o700)
    guardian.sweep_nodes(job)
    (call,) = srun.read_text().splitlines()
    assert f"{first.partition}0" not in call
    num = len(read_plan(job.campaign).components)
    assert call.count("--het-group=") == (num - 1 if first.nodes == 1 else num)


def test_a_sweep_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: Path) -> None:
    job = make_job(tmp_path, monkeypatch)
    (srun.parent / "srun").write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(guardian, "SWEEP_TIMEOUT_S", 0.2)
    guardian.sweep_nodes(job)
    assert (tmp_path / "window").exists()


def test_a_job_without_a_scheduler_has_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: Path) -> None:
    job = make_job(tmp_path, monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID")
    guardian.sweep_nodes(job)
    assert not srun.exists()
