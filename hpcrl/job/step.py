"""Run the command of a step on its node, and clean up when it ends: `python -m hpcrl.job.step JOB END COMMAND...`.

The command gets its own temporary directory, and is ended when the file END appears, or that of the whole job: srun
would kill it without notice, and resources outside its memory (semaphores, sockets) would stay on the node. Processes
that it leaves running, in any session, are ended too, also where Slurm tracks processes only by group. The semaphores
of processes that were killed are removed from the node's shared memory, and at the end of the job its windows. If this
process is killed too, the next step on the node removes them, and its temporary directory; the last one is that of the
guardian, which has a JOB and no command.

SIGTERM is not forwarded: Slurm sends it to every step at the start of a grace time, in which the trainer has a
checkpoint to save. It becomes a notice in the job's directory, and the driver decides what is still possible. Without
a driver the step ends, also if one has answered and is gone by the time when it would have ended the job. So does the
step of a reward job: its SIGTERM is not for the driver's job. SIGUSR1 and SIGUSR2 are warnings of the same kind
(`scancel --signal`), which would end processes that do not expect them: what the step starts ignores them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from hpcrl.campaign_dir.job_end import DrainTime, is_sigterm_answered, read_term_answer
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.file_watch import NameWatch, is_there
from hpcrl.system.files import publish_file
from hpcrl.system.network import current_node
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, list_descendants
from hpcrl.system.variables import KILL_WAIT_VARIABLE, PARTITION_VARIABLE
from hpcrl.weights.window.file import unlink_recorded_windows
from hpcrl.weights.window.shm_cleanup import SCRATCH_PREFIX, SegmentLedger, remove_orphan_mpi, remove_orphans

WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
TERM_GRACE_S = 3.0
DRAIN_ANSWER_TIMEOUT_S = 4.0
"""The least time for a driver to answer a notice of SIGTERM: Slurm may send SIGKILL soon."""
ANSWER_TIMEOUT_SHARE = 1 / 3
"""The share of the time until then, where it is known."""
NOTICE_INTERVAL_S = 5.0
"""The time after which a notice without an answer is published again: a change of one's own shows those of others."""
ANSWER_LOOK_INTERVAL_S = 0.25


class StepEnd:
    """The requests to a step: files that ask it to end, and SIGTERM, which it passes on as a notice.

    Without a scheduler, the end of the process that has started it counts as SIGTERM: nothing else ends a step whose
    driver and guardian were killed.
    """

    def __init__(self, job: JobDir | None, end: Path) -> None:
        self._job = job
        self._ends = {end.name} if job is None else {job.end.name, end.name}
        self._requests = NameWatch(end.parent)
        self._parent = None if "SLURM_JOB_ID" in os.environ else os.getppid()
        self._is_terminated = False
        self._noticed_at: float | None = None
        self._next_notice = self._next_look = float("-inf")
        self._answer_end: float | None = None
        """The time by which a driver that has answered drains the job."""
        self._answer: DrainTime | None = None
        """The drain, from then on."""
        self.is_alone = False
        """True if no driver has answered a notice, or the one that has is gone."""

    def listen(self) -> None:
        """Take SIGTERM of this process, and the warnings before it, as a notice."""
        for number in (signal.SIGTERM, *WARNING_SIGNALS):
            signal.signal(number, self._on_term)

    def is_over(self) -> bool:
        """Return whether the step is to end; publish a notice that is due."""
        with contextlib.suppress(OSError):  # a file system that is away for long: the step waits for it
            if self._ends & self._requests.names():
                return True
        if not self._is_terminated and self._parent in (None, os.getppid()):
            return False
        if self._job is None:
            return True
        now = time.monotonic()
        self._noticed_at = self._noticed_at or now
        if self._answer is None and now >= self._next_look:
            self._next_look = now + ANSWER_LOOK_INTERVAL_S
            self._ask_driver(self._job, now)
        if self._answer is not None:
            self.is_alone = self._answer.is_driver_overdue()
        else:
            end = self._noticed_at + find_answer_timeout() if self._answer_end is None else self._answer_end
            self.is_alone = now > end
        return self.is_alone

    def _ask_driver(self, job: JobDir, now: float) -> None:
        """Publish the notice of SIGTERM, and look for the answer."""
        with contextlib.suppress(OSError):  # a full or unreachable file system: it is tried again
            if now >= self._next_notice:
                publish_file(job.terminated, current_node())
                self._next_notice = now + NOTICE_INTERVAL_S
        if self._answer_end is None and (answer := read_term_answer(job)) is not None:
            self._answer_end = now + (answer.end_s or 0.0)
        with contextlib.suppress(OSError):
            # A drain that was published before the SIGTERM does not show that the driver is alive.
            if is_sigterm_answered(job):
                self._answer = DrainTime(job)

    def _on_term(self, *_: object) -> None:
        self._is_terminated = True


def find_answer_timeout() -> float:
    """Return how long a step waits for the answer of a driver."""
    with contextlib.suppress(ValueError):
        return max(DRAIN_ANSWER_TIMEOUT_S, ANSWER_TIMEOUT_SHARE * float(os.environ.get(KILL_WAIT_VARIABLE, "")))
    return DRAIN_ANSWER_TIMEOUT_S


def main(job: JobDir | None, end: Path, command: list[str]) -> int:
    """Run `command`, forward SIGINT, clean up; return its exit code."""
    adopt_orphans()
    remove_orphans()
    requests = StepEnd(job, end)
    requests.listen()
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, ignore_cleanup_errors=True) as scratch:
        ledger = SegmentLedger(scratch=Path(scratch))
        child = subprocess.Popen(command, env=os.environ | {"TMPDIR": scratch}, preexec_fn=_prepare_child)

        def forward(number: int, _: FrameType | None) -> None:
            child.send_signal(number)

        signal.signal(signal.SIGINT, forward)
        code = ledger.wait(child, is_over=requests.is_over)
        grace_s = 0.0 if requests.is_alone else TERM_GRACE_S
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
        ledger.record(list_descendants())
        end_descendants(grace_s=grace_s)
        ledger.clear()
        if job is not None and (requests.is_alone or is_there(job.end)):
            unlink_recorded_windows(job)
    return encode_exit_code(code)


def _prepare_child() -> None:
    """Let the command, and all that it starts, outlive warnings that Slurm sends to every process of a step."""
    die_with_parent()
    for number in WARNING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def clean_node(job: JobDir) -> int:
    """Remove what steps that were killed have left on this node, at the end of the job."""
    remove_orphans()
    remove_orphan_mpi()
    unlink_recorded_windows(job)
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(clean_node(JobDir(Path(sys.argv[1]))))
    own_job = None if PARTITION_VARIABLE in os.environ else JobDir(Path(sys.argv[1]))
    sys.exit(main(own_job, Path(sys.argv[2]), sys.argv[3:]))
