"""A step leaves nothing in the shared memory and the temporary folder of its node, also when processes are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from hpcrl.campaign_dir.job_end import DrainNotice
from hpcrl.job.step import DRAIN_ANSWER_TIMEOUT_S, find_answer_timeout
from hpcrl.system.variables import KILL_WAIT_VARIABLE, PARTITION_VARIABLE

STEP = (sys.executable, "-m", "hpcrl.job.step")
SHARED_MEMORY = Path("/dev/shm")
HOLD_SEMAPHORES = """
import multiprocessing, os, signal, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, os.environ["TMPDIR"], flush=True)
time.sleep(60)
"""


def read_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def start_step(tmp_path: Path) -> tuple["subprocess.Popen[str]", Path, Path]:
    """Start a step and wait until its ledger names its semaphore; return the step, the semaphore and the scratch."""
    command = [*STEP, str(tmp_path), str(tmp_path / "end"), sys.executable, "-c", HOLD_SEMAPHORES]
    step = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert step.stdout is not None
    name, scratch = step.stdout.readline().split()
    semaphore = SHARED_MEMORY / f"sem.{name.lstrip('/')}"
    assert semaphore.exists()
    deadline = time.monotonic() + 30
    while not any(semaphore.name in ledger.read_text() for ledger in list_ledgers(step.pid)):
        assert time.monotonic() < deadline, "the step records what its processes have mapped"
        time.sleep(0.05)
    return step, semaphore, Path(scratch)


def list_ledgers(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"hpcrl-{os.getuid()}-ledger-{pid}-*"))


def kill_with_children(pid: int) -> None:
    """Kill a step's command with multiprocessing's tracker, which would remove the semaphore."""
    for below in (*read_children(pid), pid):
        os.kill(below, signal.SIGKILL)


def test_semaphores_of_a_killed_command_are_removed(tmp_path: Path) -> None:
    step, semaphore, scratch = start_step(tmp_path)
    with step:
        kill_with_children(read_children(step.pid)[0])
        assert step.wait(30) == 128 + signal.SIGKILL
    assert not semaphore.exists()
    assert not scratch.exists()
    assert not list_ledgers(step.pid)


def test_what_a_killed_step_leaves_is_removed_by_the_next_step(tmp_path: Path) -> None:
    step, semaphore, scratch = start_step(tmp_path)
    [child] = read_children(step.pid)
    below = read_children(child)
    with step:
        for pid in (*below, step.pid, child):
            os.kill(pid, signal.SIGKILL)
    # a step of another test may remove them already
    subprocess.run([*STEP, str(tmp_path), str(tmp_path / "end"), "true"], check=True, timeout=60)
    assert not semaphore.exists()
    assert not scratch.exists()
    assert not list_ledgers(step.pid)


def run_sleeping_step(job: Path, *, seconds: float) -> "subprocess.Popen[str]":
    """Start a step whose command sleeps, and wait until the command runs."""
    command = [sys.executable, "-c", f"import time; print('ready', flush=True); time.sleep({seconds})"]
    step = subprocess.Popen([*STEP, str(job), str(job / "end-trainer-0"), *command], stdout=subprocess.PIPE, text=True)
    assert step.stdout is not None
    assert step.stdout.readline() == "ready\n"
    return step


def test_a_step_ends_when_what_has_started_it_was_killed(tmp_path: Path) -> None:
    """Without a scheduler nothing else ends it if driver and guardian are killed at once."""
    words = [*STEP, str(tmp_path), str(tmp_path / "end-trainer-0"), "sleep", "100"]
    start = f"import subprocess, sys; p = subprocess.Popen({words!r}, start_new_session=True); print(p.pid); p.wait()"
    with subprocess.Popen([sys.executable, "-uc", start], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        step = psutil.Process(int(starter.stdout.readline()))
        deadline = time.monotonic() + 30
        while not step.children():
            assert time.monotonic() < deadline, "the step runs its command"
            time.sleep(0.05)
        starter.kill()
    _, alive = psutil.wait_procs([step, *step.children()], timeout=DRAIN_ANSWER_TIMEOUT_S + 30)
    assert not alive


def test_sigterm_becomes_a_notice_and_the_command_runs_on_while_the_driver_drains(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "000"
    job.mkdir(parents=True)
    (job / "drain").write_bytes(msgspec.json.encode(DrainNotice(reason="SIGTERM", answers_sigterm=True)))
    with run_sleeping_step(job, seconds=DRAIN_ANSWER_TIMEOUT_S + 2) as step:
        step.terminate()
        assert step.wait(30) == 0, "the command came to its end"
    assert (job / "terminated").read_text()


def test_a_step_whose_driver_was_killed_after_it_had_published_a_drain_ends_after_its_notice(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "000"
    job.mkdir(parents=True)
    (job / "drain").write_bytes(msgspec.json.encode(DrainNotice(reason="its walltime is nearly over")))
    with run_sleeping_step(job, seconds=60) as step:
        step.terminate()
        assert step.wait(30) == 0
    assert (job / "terminated").exists()


def test_a_step_whose_driver_is_gone_after_its_answer_ends_when_the_job_should_have_ended(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "000"
    job.mkdir(parents=True)
    answer = DrainNotice(reason="SIGTERM", left_s=1.0, end_s=2.0, answers_sigterm=True)
    (job / "drain").write_bytes(msgspec.json.encode(answer))
    with run_sleeping_step(job, seconds=60) as step:
        step.terminate()
        assert step.wait(30) == 0
    assert (job / "terminated").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_becomes_a_notice_and_ends_nothing_that_the_step_has_started(
    tmp_path: Path, number: signal.Signals
) -> None:
    job = tmp_path / "jobs" / "000"
    job.mkdir(parents=True)
    (job / "drain").touch()
    with run_sleeping_step(job, seconds=DRAIN_ANSWER_TIMEOUT_S + 2) as step:
        step.send_signal(number)
        for child in psutil.Process(step.pid).children(recursive=True):
            child.send_signal(number)
        assert step.wait(30) == 0, "the command came to its end"
    assert (job / "terminated").read_text()


def test_a_step_waits_for_the_drain_of_a_driver_that_has_answered_though_slurm_is_slow(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "000"
    job.mkdir(parents=True)
    (job / "terminated").touch()
    answer = DrainNotice(reason="SIGTERM", end_s=DRAIN_ANSWER_TIMEOUT_S + 60, answers_sigterm=True)
    (job / "term-answer").write_bytes(msgspec.json.encode(answer))
    with run_sleeping_step(job, seconds=DRAIN_ANSWER_TIMEOUT_S + 3) as step:
        step.terminate()
        time.sleep(DRAIN_ANSWER_TIMEOUT_S + 1)
        drain = DrainNotice(reason="SIGTERM", left_s=60.0, end_s=90.0, answers_sigterm=True)
        (job / "drain").write_bytes(msgspec.json.encode(drain))
        assert step.wait(30) == 0, "the command came to its end"
    assert (job / "terminated").read_text()


def test_a_step_ends_when_a_driver_that_has_answered_does_not_drain(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "000"
    job.mkdir(parents=True)
    answer = DrainNotice(reason="SIGTERM", end_s=2.0, answers_sigterm=True)
    (job / "term-answer").write_bytes(msgspec.json.encode(answer))
    with run_sleeping_step(job, seconds=60) as step:
        step.terminate()
        assert step.wait(30) == 0


@pytest.mark.parametrize(("kill_wait", "seconds"), [("30", 10.0), ("10", 4.0), ("", 4.0), ("x", 4.0)])
def test_a_step_waits_longer_for_an_answer_where_slurm_leaves_more_time(
    monkeypatch: pytest.MonkeyPatch, kill_wait: str, seconds: float
) -> None:
    monkeypatch.setenv(KILL_WAIT_VARIABLE, kill_wait)
    assert find_answer_timeout() == pytest.approx(seconds)


def test_a_step_without_a_driver_ends_after_its_notice(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "000"
    job.mkdir(parents=True)
    with run_sleeping_step(job, seconds=60) as step:
        step.terminate()
        assert step.wait(30) == 0
    assert (job / "terminated").exists()


def test_a_step_ends_when_another_start_of_the_trainer_follows(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "000"
    job.mkdir(parents=True)
    with run_sleeping_step(job, seconds=60) as step:
        (job / "end-trainer-0").touch()
        assert step.wait(30) == 0


def test_the_step_of_a_reward_job_ends_with_sigterm_and_leaves_no_notice_for_the_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
    call = [*STEP, str(tmp_path), str(tmp_path / "end"), *command]
    environment = os.environ | {PARTITION_VARIABLE: "preempt"}
    with subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, text=True) as step:
        assert step.stdout is not None
        assert step.stdout.readline() == "ready\n"
        step.terminate()
        assert step.wait(30) == 0
    assert not (tmp_path / "terminated").exists()
