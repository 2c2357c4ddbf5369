"""The guardian: the batch script's process, which adopts every orphan of the job and cleans up after the driver, its
child, even if that was killed.

    run_guarded          fork, forward signals, wait, clean up, and only then record the outcome
    send_outcome         send the outcome to the guardian; without a guardian, clean up and record it
    cancel_reward_jobs   end the reward jobs of a driver that was killed
    CLOSE_GRACE_S, TERM_CLOSE_GRACE_S, FORWARDED_SIGNALS   constants
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from hpcrl.campaign_dir.events import JobOutcome
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.errors import SlurmError
from hpcrl.slurm import next_job
from hpcrl.slurm.commands import cancel_recorded_jobs
from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.files import publish_file
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, wait_for_descendants
from hpcrl.weights.window.file import unlink_recorded_windows
from hpcrl.weights.window.shm_cleanup import remove_orphans

CLOSE_GRACE_S = 10.0
"""The time that processes may take to end."""
TERM_CLOSE_GRACE_S = 1.5
"""The same after SIGTERM, when SIGKILL is near."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def run_guarded(drive: Callable[[int], int], place: WorkerPlace) -> int:
    """Run `drive` in a child, which writes its outcome to the given descriptor; return the exit code of the job."""
    job = place.job
    adopt_orphans()
    outcome_fd, driver_end = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # until they can be forwarded
    driver = os.fork()
    if driver == 0:
        os.close(outcome_fd)
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
        os._exit(drive(driver_end))
    os.close(driver_end)
    signals: set[int] = set()
    code = _wait_for_driver(driver, signals)
    _clean_up(job, grace_s=TERM_CLOSE_GRACE_S if signal.SIGTERM in signals else CLOSE_GRACE_S)
    reported = os.read(outcome_fd, 1 << 16)  # no process holds the other end any more
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    publish_file(job.outcome, reported or _encode_outcome("failed", f"the driver {how}"))
    if next_job.campaign_outcome(job) is not None:
        _try_cleanup(lambda: next_job.cancel_next_jobs(job))
    return encode_exit_code(code)


def send_outcome(outcome: JobOutcome, reason: str, *, outcome_fd: int, job: JobDir) -> None:
    """Send the driver's outcome to the guardian; if the guardian was killed, do its work: clean up and record it."""
    record = _encode_outcome(outcome, reason)
    try:
        os.write(outcome_fd, record)
    except BrokenPipeError:
        _clean_up(job, grace_s=CLOSE_GRACE_S)
        publish_file(job.outcome, record)


def _encode_outcome(outcome: JobOutcome, reason: str) -> bytes:
    """Return the record of a job that has ended."""
    return json.dumps({"outcome": outcome, "reason": reason[:4000], "time": time.time()}).encode()


def cancel_reward_jobs(job: JobDir) -> None:
    """End the reward jobs of a job whose driver was killed: queued ones could wait for days, then find no work."""
    _try_cleanup(lambda: cancel_recorded_jobs(job.reward_jobs))


def _wait_for_driver(driver: int, signals: set[int]) -> int:
    """Wait for the driver, forwarding `signals`, and return its exit code."""

    def forward(number: int, _: FrameType | None) -> None:
        signals.add(number)
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(driver, number)

    for sig in FORWARDED_SIGNALS:
        signal.signal(sig, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    _, status = os.waitpid(driver, 0)
    for sig in FORWARDED_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)  # the job is already ending
    return os.waitstatus_to_exitcode(status)


def _clean_up(job: JobDir, *, grace_s: float) -> None:
    """End everything that the driver started."""
    publish_file(job.end, "")  # a driver that was killed could not ask its steps to end
    wait_for_descendants(timeout_s=grace_s)
    end_descendants(grace_s=grace_s)
    unlink_recorded_windows(job)
    remove_orphans()
    cancel_reward_jobs(job)


def _try_cleanup(action: Callable[[], None]) -> None:
    """Run a cleanup and print its error; a job left behind ends at its walltime, or when it finds no work."""
    try:
        action()
    except (SlurmError, OSError) as error:
        print(f"hpcrl: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the batch log is where people look
