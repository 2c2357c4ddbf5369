"""Run the metrics process beside the driver; when it fails, the job continues and an event is recorded.

MetricsProcess    start, restart and end it
EXPORT_CLOSE_TIMEOUT_S   constant
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from hpcrl.campaign_dir.events import CampaignEvent, FaultReported
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import MetricsConfig
from hpcrl.system.files import read_last_line
from hpcrl.system.processes import MAX_RESTARTS

EXPORT_CLOSE_TIMEOUT_S = 10.0


class MetricsProcess:
    """The metrics process of one job; it does not run if the recipe has metrics only in the events."""

    def __init__(self, place: WorkerPlace, *, metrics: MetricsConfig, emit: Callable[[CampaignEvent], None]) -> None:
        self._is_wanted = metrics.tensorboard or metrics.mlflow or metrics.wandb != "off"
        campaign, job = place.campaign, place.job
        self._command = [sys.executable, "-m", "hpcrl.job.metrics_export", str(campaign.root), str(job.number)]
        self._log = job.log("metrics-0")
        self._emit = emit
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    def keep_running(self) -> None:
        """Start it, or restart it a few times; after that the campaign continues without."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            why = f"exit code {self._process.returncode}: {read_last_line(self._log)}"
            self._process = None
            self._emit(FaultReported(what="metrics", detail=f"the metrics process ended: {why}"))
        if self._is_wanted and self._num_starts <= MAX_RESTARTS:
            self._start()

    def close(self) -> None:
        """Let it export the remaining events, for at most EXPORT_CLOSE_TIMEOUT_S."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(EXPORT_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own session
            self._process.wait()

    def _start(self) -> None:
        self._num_starts += 1
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        finally:
            os.close(log)
