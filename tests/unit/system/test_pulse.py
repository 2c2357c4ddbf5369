"""The pulse of a worker: what its parent sees of it, and what it does then."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.system import pulse
from hpcrl.system.pulse import PULSE_PREFIX, PulseWatch, SilentProcess, end_silent

BEAT = """
import os, sys, time
{first}
from hpcrl.system.pulse import expect_nothing, expect_work, note_work, start_pulse
start_pulse(rank=3, silence_s=5.0)
{work}
print("up", flush=True)
time.sleep(300)
"""


class AdvancedClock:
    """A clock that is ahead of the node's by a settable time."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> AdvancedClock:
    return AdvancedClock()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    """A function that starts a child with a pulse and waits until it has one."""
    children = []

    def start_child(work: str = "", *, first: str = "") -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-c", BEAT.format(work=work, first=first)],
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "log").open("w"),
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        return child

    yield start_child
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def look_later(watch: PulseWatch, clock: AdvancedClock, *, after_s: float) -> list[SilentProcess]:
    """Look every 2 s until that time."""
    target = clock.ahead_s + after_s
    while clock.ahead_s < target:
        clock.ahead_s += 2.0
        found = watch.look()
    return found


def test_a_process_that_is_stopped_is_silent_and_one_that_works_is_not(start, clock, tmp_path):
    stopped, working = start(), start()
    stopped.send_signal(signal.SIGSTOP)
    watch = PulseWatch(tmp_path, clock=clock)
    assert look_later(watch, clock, after_s=2.0) == []
    (silent,) = [one for one in look_later(watch, clock, after_s=4.0) if one.pid != working.pid]
    assert silent == SilentProcess(stopped.pid, 3, "it has stood still for 5 s (job.silence_timeout_s)")


def test_a_process_that_a_child_has_forked_is_watched_too(start, clock, tmp_path):
    start(first="child = os.fork(); child and (os.waitpid(child, 0), os._exit(0))")
    (path,) = tmp_path.glob(f"{PULSE_PREFIX}*")
    pid = int(path.name.removeprefix(PULSE_PREFIX))
    os.kill(pid, signal.SIGSTOP)
    watch = PulseWatch(tmp_path, clock=clock)
    assert [one.pid for one in look_later(watch, clock, after_s=8.0)] == [pid]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ('expect_work("ended no turn", 4.0)', "it has ended no turn for 4 s"),
        ('expect_work("ended no turn", 4.0); expect_nothing()', None),
        ("note_work()", None),
    ],
)
def test_a_process_that_beats_and_does_not_work_is_silent_only_where_work_is_expected(
    start, clock, tmp_path, work, reason
):
    start(work.replace("4.0", "0.5") if reason else work)
    time.sleep(1.0)
    found = [one.reason.replace("0.5", "4") for one in PulseWatch(tmp_path).look()]
    assert found == [] if reason is None else [reason]


def test_a_parent_that_stood_still_itself_waits_again(start, clock, tmp_path):
    child = start()
    child.send_signal(signal.SIGSTOP)
    watch = PulseWatch(tmp_path, clock=clock)
    clock.ahead_s = 1000.0
    assert watch.look() == []
    assert [one.pid for one in look_later(watch, clock, after_s=8.0)] == [child.pid]


def test_a_stopped_process_writes_its_stacks_before_it_is_killed(start, tmp_path, monkeypatch):
    monkeypatch.setattr(pulse, "STACKS_GRACE_S", 1.0)
    child = start()
    child.send_signal(signal.SIGSTOP)
    end_silent(child.pid)
    assert child.wait(30) == -signal.SIGKILL
    assert "Current thread" in (tmp_path / "log").read_text()


def test_pulses_of_processes_that_have_ended_or_are_of_others_are_removed(start, tmp_path):
    child = start()
    child.kill()
    child.wait()
    others = tmp_path / f"{PULSE_PREFIX}1"
    others.write_bytes(b"")
    assert PulseWatch(tmp_path).look() == []
    assert list(tmp_path.glob(f"{PULSE_PREFIX}*")) == []


def test_a_process_that_ends_removes_its_pulse(tmp_path):
    code = "from hpcrl.system.pulse import start_pulse; start_pulse(rank=0, silence_s=5.0)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=True)
    assert list(tmp_path.glob(f"{PULSE_PREFIX}*")) == []


def test_a_pulse_that_is_being_made_is_not_judged(tmp_path):
    child = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / f"{PULSE_PREFIX}{child.pid}").write_bytes(b"")
        assert PulseWatch(tmp_path).look() == []
    finally:
        child.kill()
        child.wait()
