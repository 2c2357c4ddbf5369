"""The step of the couriers, and the rung of the ladder that versions of the weights go by.

    rungs      what a site lets us try above files, best first
    Way        a rung, and the step that carries versions on it
    Couriers   starts the step, watches it, starts it again alone; says when the rung changes
    WeightPlane  a job's couriers for its driver: publishes the rung in use, emits what changes

The ladder: one MPI step over all nodes that need weights (joined over het groups, or inside one allocation), else the
same step over TCP, else files. A rung that never came to serve is left for good. One that served and then failed too
often is tried again after a while, and when an engine has asked for files, versions go by couriers again once they have
brought a later one to every node; both a few times in a job. A campaign never waits for its couriers.
"""

import contextlib
import importlib.util
import math
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.campaign_dir.events import CampaignEvent, RungChanged, WorkerFailed, WorkerRestarted
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import Mpi
from hpcrl.plan.layout import Layout
from hpcrl.plan.plan import Plan
from hpcrl.system.files import discard, last_line, private_dir, publish
from hpcrl.system.processes import PAUSE_S, end_group
from hpcrl.weights.couriers.protocol import Standing
from hpcrl.weights.versions import Rung, RungName, newest_version, read_rung, set_rung

STARTUP_S = 180.0
"""How long the couriers may take to find each other; they give up by themselves before."""
STEADY_S = 60.0
"""Couriers that have served so long have done well: what went wrong before is forgotten."""
RESTARTS = 5
"""How often in a row couriers that have served are started again."""
TRIES = 2
"""How often a rung is tried that has never served."""
RETURNS = 3
"""How often in a job versions go by couriers again after they went by files."""
RETRY_S = 60.0
"""After so long with files, couriers that were given up are tried again; each further time after four times as long."""
ENDING_S = 15.0
"""How long a step may take to end after one of its ranks has given up."""
MUTE_S = 30.0
"""Couriers that have said nothing for so long are gone, though their step has not ended: srun may hang."""
LOOK_EVERY_S = 0.5
LEAVE_S = 3.0
TERM_GRACE_S = 2.0


def rungs(mpi: Mpi, *, layout: Layout) -> tuple[list[RungName], str]:
    """What can be tried above files, best first, and what keeps MPI, or all of it, from being tried."""
    if not mpi.couriers:
        return [], "the site does not want couriers (site.mpi.couriers = false)"
    if (why := _no_mpi(mpi, layout)) is not None:
        return ["tcp"], why
    return ["mpi", "tcp"], ""


def _no_mpi(mpi: Mpi, layout: Layout) -> str | None:
    if mpi.flavour == "none":
        return 'the site has no MPI (site.mpi.flavour = "none")'
    if mpi.world_over_components == "no" and layout == "hetjob":
        return 'the site has no MPI over several components (site.mpi.world_over_components = "no")'
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'hpcrl[mpi]'"
    return None


@dataclass(frozen=True)
class Way:
    """A rung above files."""

    rung: RungName
    command: Sequence[str]
    """The couriers' step; every life of it is given a name."""


@dataclass
class Couriers:
    """The couriers of a job, in their present life."""

    job: JobDir
    weights: Path
    """Where the rung is said, also by an engine that asks for files."""
    ways: list[Way]
    """Best first."""
    rung: Rung
    """The one in use."""
    life: str = ""
    _num_useless: int = 0
    """Ways that were of no use, and are not tried again on these nodes."""
    _process: "subprocess.Popen[bytes] | None" = None
    _began: float = 0.0
    _patience: float = 0.0
    """Until then, a step that runs and does not serve is left alone: it is coming up, or ending by itself."""
    _next_look: float = 0.0
    _beat: float = 0.0
    _heard: float = 0.0
    """When the beat was seen to change."""
    _failures: int = 0
    _has_served: bool = False
    _start_at: float = math.inf
    """When those that have ended are started again."""
    _returns_left: int = RETURNS
    _asked_at: int | None = None
    """The newest version when an engine was seen to have asked for files."""

    def start(self) -> None:
        """Begin the step; nobody waits for it."""
        discard(self.job.couriers(self.life))
        self.life = secrets.token_hex(8)
        command = [*self.ways[self._num_useless].command, f"--life={self.life}"]
        with self.job.log("couriers").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._began = time.monotonic()
        self._patience = self._began + STARTUP_S

    def tend(self) -> str | None:
        """See how they are, start them again if they have ended; what went wrong, if something has."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_EVERY_S
        if self._process is None:
            self._start_if_due(now)
            return None
        standing, code = Standing.read(self.job.couriers(self.life)), self._process.poll()
        if code is None and standing is not None and standing.ready and not self._is_mute(now):
            self._has_served = True
            self._patience = now + ENDING_S
            self._rise(standing)
            return None
        if code is None and now < self._patience:
            return None
        reason = self._why(standing, code)
        self._end()
        self._failures = 1 if now - self._began > STEADY_S else self._failures + 1
        if standing is not None and standing.hopeless:
            self._go_down(reason, for_good=True)
        elif self._failures > (RESTARTS if self._has_served else TRIES - 1):
            self._go_down(reason, for_good=not self._has_served)
        else:
            self._start_at = self._began + PAUSE_S
        self._start_if_due(now)
        return reason

    def _rise(self, standing: Standing) -> None:
        """Up from files: they serve now, or have done since an engine asked for files what it missed."""
        name = self.ways[self._num_useless].rung
        if self.rung.rung != name:
            self.rung = Rung(rung=name, reason=standing.reason)
            return
        said = read_rung(self.weights)
        if said is None or said.rung != "files":
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = newest_version(self.weights) or 0
        elif self._returns_left > 0 and standing.carried is not None and standing.carried > self._asked_at:
            self._returns_left -= 1
            reason = f"every node has version {standing.carried}, made after an engine had asked for files"
            self.rung = Rung(rung=name, reason=reason)
            self._asked_at = None

    def _go_down(self, reason: str, *, for_good: bool) -> None:
        """Files for now; the next rung if this one is of no use, else this one again, later."""
        self.rung = Rung(rung="files", reason=reason)
        self._failures = 0
        if for_good:
            self._num_useless += 1
            self._has_served = False
            self._start_at = self._began if self._num_useless < len(self.ways) else math.inf
        elif self._returns_left > 0:
            self._start_at = time.monotonic() + RETRY_S * 4 ** (RETURNS - self._returns_left)
            self._returns_left -= 1
        else:
            self._start_at = math.inf

    def _start_if_due(self, now: float) -> None:
        if now >= self._start_at:
            self.start()

    def go(self, ways: list[Way]) -> None:
        """Other ways, on the nodes that are left when one is lost; a rung that failed there may have failed by that."""
        if ways != self.ways:
            self._end()
            self.ways, self._num_useless, self._failures, self._has_served = ways, 0, 0, False
            self.start()

    @property
    def running(self) -> bool:
        """A step of theirs is under way."""
        return self._process is not None

    def close(self) -> None:
        """End them for good; once the job drains they leave by themselves, and take their windows with them."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
        self._end()

    def _is_mute(self, now: float) -> bool:
        """Every life has a file of its own, so that its first beat is a change."""
        beat = Standing.beaten(self.job.couriers(self.life))
        if beat != self._beat:
            self._beat, self._heard = beat, now
        return now - self._heard > MUTE_S

    def _why(self, standing: Standing | None, code: int | None) -> str:
        if standing is not None and not standing.ready:
            return standing.reason
        if code is None and standing is not None:
            return f"nothing was heard of the couriers for {MUTE_S:g} s, and their step does not end"
        if code is None:
            return f"the couriers did not find each other within {STARTUP_S:g} s"
        return f"the step of the couriers ended with code {code}: {last_line(self.job.log('couriers'))}"

    def _end(self) -> None:
        if self._process is not None:
            end_group(self._process, grace_s=TERM_GRACE_S)
            self._process = None


class WeightPlane:
    """The way that a job's weights take, as its driver sees it: by files, and by couriers once these serve."""

    def __init__(
        self,
        place: WorkerPlace,
        *,
        plan: Plan,
        ways: Callable[[Sequence[RungName]], list[Way]],
        emit: Callable[[CampaignEvent], None],
    ) -> None:
        """`ways` makes the couriers' commands on the nodes that are left."""
        self._run = place.campaign
        self._job = place.job
        self._layout = plan.layout
        self._ways = ways
        self._emit = emit
        self._couriers: Couriers | None = None

    def start(self, mpi: Mpi) -> None:
        """Weights go by files until couriers serve; on one machine the trainer's window is enough, and it says so."""
        if self._layout == "local":
            return
        above, why = rungs(mpi, layout=self._layout)
        starting = f"the couriers are being started ({above[0]})" if above else ""
        rung = Rung(rung="files", reason="; ".join(filter(None, (why, starting))))
        self._take_rung(rung)
        if above:
            self._couriers = Couriers(job=self._job, weights=self._run.weights, ways=self._ways(above), rung=rung)
            self._couriers.start()

    def tend(self) -> None:
        """When couriers fail, weights go by files from then on: a campaign never dies of its weight plane."""
        couriers = self._couriers
        if couriers is None:
            return
        before, were_running = couriers.rung, couriers.running
        if (wrong := couriers.tend()) is not None:
            self._emit(WorkerFailed(of="couriers", reason=wrong))
        if couriers.running and (wrong is not None or not were_running):
            self._emit(WorkerRestarted(of="couriers"))
        if couriers.rung != before:
            self._take_rung(couriers.rung)

    def go_around(self) -> None:
        """Start the couriers again on the nodes that are left, after one was lost."""
        if self._couriers is not None:
            self._couriers.go(self._ways([way.rung for way in self._couriers.ways]))

    def close(self) -> None:
        """End the couriers; a job that drains tells them that this is the end, and their windows go."""
        if self._couriers is not None:
            if not self._job.drain.exists():
                publish(self._job.drain, "the job is ending")
            self._couriers.close()

    def _take_rung(self, rung: Rung) -> None:
        set_rung(private_dir(self._run.weights), rung)
        self._emit(RungChanged(rung=rung.rung, reason=rung.reason))
