"""Queue the job that follows this one in a thread, as a Slurm that is slow must not delay the answer to SIGTERM."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial

from hpcrl.campaign_dir.events import CampaignEvent, FaultReported
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import Site
from hpcrl.job.job_drain import JobDrain
from hpcrl.plan.plan import Plan
from hpcrl.slurm import next_job
from hpcrl.slurm.allocation import find_own_id, scrub_environment

MAX_QUEUEING_S = 60.0
"""The time for which a job that failed at its start waits for Slurm to queue the next one."""


class NextJobQueue:
    """The driver's thread that queues the next job."""

    def __init__(self, place: WorkerPlace, *, plan: Plan, site: Site, emit: Callable[[CampaignEvent], object]) -> None:
        self._place, self._plan, self._site, self._emit = place, plan, site, emit
        self._thread: threading.Thread | None = None
        self._last_refusal = ""

    def start(self) -> None:
        """Queue the next job, unless that is just being done, or has been."""
        if self._thread is not None and self._thread.is_alive():
            return
        slurm_id, environ = find_own_id(self._plan), dict(os.environ)
        if slurm_id is not None:  # that of the script becomes the job's
            scrub_environment(environ)
        queue = partial(
            next_job.try_queue_next_jobs,
            self._place,
            plan=self._plan,
            site=self._site,
            slurm_id=slurm_id,
            emit=self._report,
            env=environ,
        )
        self._thread = threading.Thread(target=queue, name="next-job", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until Slurm has answered."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def wait_long(self, drain: JobDrain, *, note_turn: Callable[[], object]) -> None:
        """Wait until Slurm has answered, unless this job is about to be killed."""
        deadline, requests = time.monotonic() + MAX_QUEUEING_S, drain.requests
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            note_turn()
            self.wait(MAX_QUEUEING_S / 60)
            if requests.is_cancelled or requests.has_termination():
                self.wait(drain.choose_grace())
                return

    def _report(self, event: CampaignEvent) -> None:
        """Emit what has become of the next job; a refusal that is the last one again is not repeated."""
        refusal = event.detail if isinstance(event, FaultReported) else ""
        if not refusal or refusal != self._last_refusal:
            self._emit(event)
        self._last_refusal = refusal
