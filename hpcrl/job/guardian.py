"""The batch script's own process: it adopts every orphan of the job, and leaves nothing behind whatever becomes of its
child, the driver.

guarded         fork, pass signals on, wait, clear up, and only then record the outcome
verdict         how the driver tells how it went
cancel_rewards  the small jobs of a driver that cannot end them any more
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.errors import SlurmError
from hpcrl.job import next_job
from hpcrl.job.next_job import JobOutcome
from hpcrl.slurm.commands import cancel_recorded_jobs
from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.files import publish_file
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, wait_for_descendants
from hpcrl.weights.window.file import unlink_recorded_windows

CLOSE_GRACE_S = 10.0
"""How long what is ending may take."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def run_guarded(drive: Callable[[int], int], place: WorkerPlace) -> int:
    """Run `drive` in a child, which writes its verdict to the descriptor that it is given; the exit code of the job."""
    campaign, job = place.campaign, place.job
    adopt_orphans()
    outcome_fd, driver_end = os.pipe()
    driver = os.fork()
    if driver == 0:
        os.close(outcome_fd)
        die_with_parent()
        os._exit(drive(driver_end))
    os.close(driver_end)
    code = _wait_for_driver(driver)
    _clean_up(job)
    reported = os.read(outcome_fd, 1 << 16)  # nobody else holds the other end any more
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    publish_file(job.outcome, reported or outcome_json("failed", f"the driver {how}"))
    if next_job.campaign_outcome(campaign, job) is not None:
        _try_cleanup(lambda: next_job.cancel_next_job(campaign, job))
    return encode_exit_code(code)


def outcome_json(outcome: JobOutcome, reason: str) -> bytes:
    """What is recorded of a job that has ended."""
    return json.dumps({"outcome": outcome, "reason": reason[:4000], "time": time.time()}).encode()


def cancel_reward_jobs(job: JobDir) -> None:
    """Of a job whose driver was killed: one that is queued could wait for days, to find nobody to work for."""
    _try_cleanup(lambda: cancel_recorded_jobs(job.reward_jobs))


def _wait_for_driver(driver: int) -> int:
    """How the driver ended, once it has."""

    def forward(number: int, _: FrameType | None) -> None:
        os.kill(driver, number)

    for sig in FORWARDED_SIGNALS:
        signal.signal(sig, forward)
    _, status = os.waitpid(driver, 0)
    for sig in FORWARDED_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)  # from here on the end is on its way
    return os.waitstatus_to_exitcode(status)


def _clean_up(job: JobDir) -> None:
    """Nothing that belonged to the driver is left."""
    publish_file(job.end, "")  # a driver that was killed could not ask its steps to end
    wait_for_descendants(timeout_s=CLOSE_GRACE_S)
    end_descendants(grace_s=CLOSE_GRACE_S)
    unlink_recorded_windows(job)
    cancel_reward_jobs(job)


def _try_cleanup(action: Callable[[], None]) -> None:
    """What Slurm does not answer now ends with its walltime, or when it sees that nothing is to do."""
    try:
        action()
    except (SlurmError, OSError) as error:
        print(f"hpcrl: {error}", file=sys.stderr, flush=True)
