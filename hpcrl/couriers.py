"""The step of the couriers, and the rung of the ladder that versions of the weights go by.

    why_not    what keeps couriers from being started at all
    Couriers   starts their step, watches it, starts it again alone; says when the rung changes

The ladder: one MPI step over all components that need weights, else files. A campaign never waits for its couriers.
"""

import contextlib
import importlib.util
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.files import discard, last_line
from hpcrl.processes import end_group
from hpcrl.rundir import JobDir
from hpcrl.site import Mpi
from hpcrl.weights.transfer import Standing
from hpcrl.weights.versions import Rung

STARTUP_S = 90.0
"""How long the couriers may take to find each other; they give up by themselves before."""
STEADY_S = 60.0
"""Couriers that have served so long have done well: what went wrong before is forgotten."""
RESTARTS = 5
"""How often in a row they are started again."""
ENDING_S = 15.0
"""How long a step may take to end after one of its ranks has given up."""
LOOK_EVERY_S = 0.5
LEAVE_S = 3.0
TERM_GRACE_S = 2.0


def why_not(mpi: Mpi) -> str | None:
    """What keeps couriers from being started on a site; None if nothing does."""
    if not mpi.couriers:
        return "the site does not ask for couriers (site.mpi.couriers = false)"
    if mpi.flavour == "none":
        return 'the site has no MPI (site.mpi.flavour = "none")'
    if mpi.world_over_components == "no":
        return 'the site has no MPI over several components (site.mpi.world_over_components = "no")'
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'hpcrl[mpi]'"
    return None


@dataclass
class Couriers:
    """The couriers of a job, in their present life."""

    job: JobDir
    command: Sequence[str]
    rung: Rung
    """The one in use."""
    _process: "subprocess.Popen[bytes] | None" = None
    _began: float = 0.0
    _patience: float = 0.0
    """Until then, a step that runs and does not serve is left alone: it is coming up, or ending by itself."""
    _next_look: float = 0.0
    _failures: int = 0

    def start(self) -> None:
        """Begin the step; nobody waits for it."""
        discard(self.job.couriers)
        with self.job.log("couriers").open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._began = time.monotonic()
        self._patience = self._began + STARTUP_S

    def tend(self) -> str | None:
        """See how they are, start them again if they have ended; what went wrong, if something has."""
        now = time.monotonic()
        if self._process is None or now < self._next_look:
            return None
        self._next_look = now + LOOK_EVERY_S
        standing, code = Standing.read(self.job.couriers), self._process.poll()
        if code is None and standing is not None and standing.ready:
            if self.rung.rung != "mpi":
                self.rung = Rung(rung="mpi", reason=standing.reason)
            self._patience = now + ENDING_S
            return None
        if code is None and now < self._patience:
            return None
        reason = self._why(standing, code)
        self._end()
        self._failures = 1 if now - self._began > STEADY_S else self._failures + 1
        if self._failures > RESTARTS or (standing is not None and standing.hopeless):
            self.rung = Rung(rung="files", reason=reason)
        else:
            self.start()
        return reason

    @property
    def running(self) -> bool:
        """False once they were given up."""
        return self._process is not None

    def close(self) -> None:
        """End them for good; once the job drains they leave by themselves, and take their windows with them."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
        self._end()

    def _why(self, standing: Standing | None, code: int | None) -> str:
        if standing is not None and not standing.ready:
            return standing.reason
        if code is None:
            return f"the couriers did not find each other within {STARTUP_S:g} s"
        return f"the step of the couriers ended with code {code}: {last_line(self.job.log('couriers'))}"

    def _end(self) -> None:
        if self._process is not None:
            end_group(self._process, grace_s=TERM_GRACE_S)
            self._process = None
