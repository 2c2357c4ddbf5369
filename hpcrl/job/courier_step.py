"""The step of the couriers, and the transport by which versions of the weights are sent.

    list_transports     the transports that a site allows, other than files, best first
    TransportCommand    a transport, and the step that sends versions by it
    CourierSupervisor   start, watch and restart the step; choose the transport in use
    WeightPlane         the couriers of a job for its driver: publish the transport in use, emit changes
    STARTUP_TIMEOUT_S, STEADY_AFTER_S, MAX_RESTARTS, MAX_TRIES, MAX_RETURNS, RETURN_INTERVAL_S, END_TIMEOUT_S   limits
    COURIERS_SILENCE_TIMEOUT_S, STEP_POLL_INTERVAL_S, RESTART_DELAY_S, LEAVE_TIMEOUT_S, TERM_GRACE_S   more of them

The fallback order: one MPI step over all nodes that need weights (joined over het groups, or inside one allocation),
else the same step over TCP (one in each job, where components are separate jobs), else files. A transport that never
served is dropped for good. One that served and then failed too often is retried after a while. When an engine has asked
for files, couriers are used again once they have delivered a later version to every node. Both happen a few times in a
job. A campaign never waits for its couriers.
"""

import contextlib
import importlib.util
import math
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.events import CampaignEvent, TransportChanged, WorkerFailed, WorkerRestarted
from hpcrl.campaign_dir.job_end import DrainNotice
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import MpiConfig
from hpcrl.plan.layout import JobLayout
from hpcrl.plan.plan import Plan
from hpcrl.system.files import make_private_dir, publish_file, read_last_line, remove_path
from hpcrl.system.processes import MIN_RESTART_INTERVAL_S, end_groups
from hpcrl.weights.couriers.protocol import CourierStatus
from hpcrl.weights.versions import Transport, TransportName, find_newest_version, read_transport, write_transport

STARTUP_TIMEOUT_S = 180.0
"""The time that couriers may take to connect to each other; they stop trying before that."""
STEADY_AFTER_S = 60.0
"""Couriers that served this long are healthy: earlier failures no longer count."""
MAX_RESTARTS = 5
"""The most restarts in a row of couriers that have served."""
MAX_TRIES = 2
"""The most tries of a transport that has never served."""
MAX_RETURNS = 3
"""The most returns in a job from files to couriers."""
RETURN_INTERVAL_S = 60.0
"""After this long with files, abandoned couriers are tried again; each further time after four times as long."""
END_TIMEOUT_S = 15.0
"""The time that a step may take to end after one of its ranks has stopped serving."""
COURIERS_SILENCE_TIMEOUT_S = 30.0
"""Couriers without a heartbeat for this long are lost, even if their step has not ended: srun may hang."""
STEP_POLL_INTERVAL_S = 0.5
RESTART_DELAY_S = 1.5
"""Time before a restart: SIGTERM, which ends couriers at once, may have been sent to the whole job."""
LEAVE_TIMEOUT_S = 3.0
TERM_GRACE_S = 2.0


def list_transports(mpi: MpiConfig, *, layout: JobLayout) -> tuple[list[TransportName], str]:
    """Return the transports to try before files, best first, and why MPI, or all of them, cannot be tried."""
    if layout == "colocated":
        return [], "the trainer and engines are on the same nodes"
    if not mpi.couriers:
        return [], "the site disables couriers (site.mpi.couriers = false)"
    if (why := _explain_no_mpi(mpi, layout)) is not None:
        return ["tcp"], why
    return ["mpi", "tcp"], ""


def _explain_no_mpi(mpi: MpiConfig, layout: JobLayout) -> str | None:
    if mpi.flavour == "none":
        return 'the site has no MPI (site.mpi.flavour = "none")'
    if layout == "multi-job":
        return "no MPI world spans jobs, and each component is one"
    if mpi.world_over_components == "no" and layout == "hetjob":
        return 'the site has no MPI over several components (site.mpi.world_over_components = "no")'
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'hpcrl[mpi]'"
    return None


@dataclass(frozen=True)
class TransportCommand:
    """A transport other than files, and its commands."""

    transport: TransportName
    commands: Sequence[Sequence[str]]
    """The command of the couriers' step, or of a step in each job; every start adds the name of its incarnation."""


@dataclass
class CourierSupervisor:
    """The supervisor of a job's couriers and of the incarnation that runs."""

    job: JobDir
    weights: Path
    """The directory of the weights; the transport is stored there, also by an engine that asks for files."""
    commands: list[TransportCommand]
    """Best first."""
    transport: Transport
    """The transport in use."""
    incarnation: str = ""
    _num_useless: int = 0
    """The number of commands that proved useless and are not tried again on these nodes."""
    _processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    _started_at: float = 0.0
    _patient_until: float = 0.0
    """Until then, a running step that does not serve is left alone: it is starting, or ending by itself."""
    _next_poll: float = 0.0
    _last_beat: float = 0.0
    _beat_changed_at: float = 0.0
    """The time at which the heartbeat was last seen to change."""
    _failures: int = 0
    _has_served: bool = False
    _start_at: float = math.inf
    """The time at which an ended step is restarted."""
    _returns_left: int = MAX_RETURNS
    _version_at_request: int | None = None
    """The newest version when an engine was seen to have asked for files."""

    def start(self) -> None:
        """Start the step without waiting for it."""
        remove_path(self.job.courier_status(self.incarnation))
        self.incarnation = secrets.token_hex(8)
        own = f"--incarnation={self.incarnation}"
        with self.job.log("couriers").open("ab") as log:
            for command in self.commands[self._num_useless].commands:
                process = subprocess.Popen(
                    [*command, own], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
                self._processes.append(process)
        self._started_at = time.monotonic()
        self._patient_until = self._started_at + STARTUP_TIMEOUT_S

    def poll(self) -> str | None:
        """Check the couriers and restart them if they have ended; return the failure, if there was one."""
        now = time.monotonic()
        if now < self._next_poll:
            return None
        self._next_poll = now + STEP_POLL_INTERVAL_S
        if not self._processes:
            self._start_if_due(now)
            return None
        status, code = CourierStatus.read(self.job.courier_status(self.incarnation)), self._find_code()
        if code is None and status is not None and status.ready and not self._is_silent(now):
            self._has_served = True
            self._patient_until = now + END_TIMEOUT_S
            self._return_from_files(status)
            return None
        if code is None and now < self._patient_until:
            return None
        reason = self._failure_reason(status, code)
        self._end_step()
        self._failures = 1 if now - self._started_at > STEADY_AFTER_S else self._failures + 1
        if status is not None and status.hopeless:
            self._fall_back(reason, permanently=True)
        elif self._failures > (MAX_RESTARTS if self._has_served else MAX_TRIES - 1):
            self._fall_back(reason, permanently=not self._has_served)
        else:
            self._start_at = max(self._started_at + MIN_RESTART_INTERVAL_S, now + RESTART_DELAY_S)
        self._start_if_due(now)
        return reason

    def _return_from_files(self, status: CourierStatus) -> None:
        """Use couriers again: they now serve, or have delivered a version later than an engine's request for files."""
        name = self.commands[self._num_useless].transport
        if self.transport.name != name:
            self.transport = Transport(name=name, reason=status.reason)
            return
        announced = read_transport(self.weights)
        if announced is None or announced.name != "files":
            self._version_at_request = None
        elif self._version_at_request is None:
            self._version_at_request = find_newest_version(self.weights) or 0
        elif self._returns_left > 0 and status.carried is not None and status.carried > self._version_at_request:
            self._returns_left -= 1
            reason = f"every node has received version {status.carried}, which is later than the request for files"
            self.transport = Transport(name=name, reason=reason)
            self._version_at_request = None

    def _fall_back(self, reason: str, *, permanently: bool) -> None:
        """Use files for now; start the next transport if this one is useless, else retry this one later."""
        self.transport = Transport(name="files", reason=reason)
        self._failures = 0
        if permanently:
            self._num_useless += 1
            self._has_served = False
            self._start_at = self._started_at if self._num_useless < len(self.commands) else math.inf
        elif self._returns_left > 0:
            self._start_at = time.monotonic() + RETURN_INTERVAL_S * 4 ** (MAX_RETURNS - self._returns_left)
            self._returns_left -= 1
        else:
            self._start_at = math.inf

    def _start_if_due(self, now: float) -> None:
        if now >= self._start_at:
            self.start()

    def replace_commands(self, commands: list[TransportCommand]) -> None:
        """Use new commands after a node was lost; transports that failed are tried again, as that may be why."""
        if commands != self.commands:
            self._end_step()
            self.commands, self._num_useless, self._failures, self._has_served = commands, 0, 0, False
            self.start()

    @property
    def is_running(self) -> bool:
        """True while a step has been started and not ended."""
        return bool(self._processes)

    def _find_code(self) -> int | None:
        """Return the exit code of the first step that has ended; None while all run."""
        return next((code for process in self._processes if (code := process.poll()) is not None), None)

    def close(self) -> None:
        """End the couriers for good; in a draining job they end by themselves and remove their windows."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        self._end_step()

    def _is_silent(self, now: float) -> bool:
        """Return whether the heartbeat has stopped; the first beat of an incarnation, in its own file, is a change."""
        beat = CourierStatus.read_touch_time(self.job.courier_status(self.incarnation))
        if beat != self._last_beat:
            self._last_beat, self._beat_changed_at = beat, now
        return now - self._beat_changed_at > COURIERS_SILENCE_TIMEOUT_S

    def _failure_reason(self, status: CourierStatus | None, code: int | None) -> str:
        if status is not None and not status.ready:
            return status.reason
        if code is None and status is not None:
            return f"the couriers sent no heartbeat for {COURIERS_SILENCE_TIMEOUT_S:g} s, and their step does not end"
        if code is None:
            return f"the couriers did not connect to each other within {STARTUP_TIMEOUT_S:g} s"
        return f"the step of the couriers ended with code {code}: {read_last_line(self.job.log('couriers'))}"

    def _end_step(self) -> None:
        end_groups(self._processes, grace_s=TERM_GRACE_S)
        self._processes.clear()


class WeightPlane:
    """The transport of a job's weights, as its driver sees it: files, and couriers once these serve."""

    def __init__(
        self,
        place: WorkerPlace,
        *,
        plan: Plan,
        find_commands: Callable[[Sequence[TransportName]], list[TransportCommand]],
        emit: Callable[[CampaignEvent], None],
    ) -> None:
        """Take `find_commands`, which returns the couriers' commands on the nodes that are left."""
        self._campaign = place.campaign
        self._job = place.job
        self._layout = plan.layout
        self._is_on_one_node = plan.is_on_one_node
        self._has_couriers = plan.has_couriers
        self._find_commands = find_commands
        self._emit = emit
        self._couriers: CourierSupervisor | None = None

    def start(self, mpi: MpiConfig) -> None:
        """Publish files as the transport and start the couriers; on one node the trainer's window is enough."""
        if self._is_on_one_node:
            return
        above, why = list_transports(mpi, layout=self._layout)
        if above and not self._has_couriers:
            above, why = [], "by the plan, two versions of the weights do not fit on a node with engines"
        starting = f"until the couriers have started ({above[0]})" if above else ""
        files = Transport(name="files", reason="; ".join(filter(None, (starting, why))))
        self._use_transport(files)
        if above:
            self._couriers = CourierSupervisor(
                job=self._job, weights=self._campaign.weights, commands=self._find_commands(above), transport=files
            )
            self._couriers.start()

    def poll(self) -> None:
        """Check the couriers; if they fail, use files: the campaign survives any failure of its weight plane."""
        couriers = self._couriers
        if couriers is None:
            return
        before, were_running = couriers.transport, couriers.is_running
        if (wrong := couriers.poll()) is not None:
            self._emit(WorkerFailed(of="couriers", reason=wrong))
        if couriers.is_running and (wrong is not None or not were_running):
            self._emit(WorkerRestarted(of="couriers"))
        if couriers.transport != before:
            self._use_transport(couriers.transport)

    def restart_on_remaining_nodes(self) -> None:
        """Restart the couriers on the nodes that are left, after one was lost."""
        if self._couriers is not None:
            self._couriers.replace_commands(self._find_commands([one.transport for one in self._couriers.commands]))

    def close(self) -> None:
        """End the couriers; the drain file asks them to remove their windows first."""
        if self._couriers is not None:
            if not self._job.drain.exists():
                publish_file(
                    self._job.drain, msgspec.json.encode(DrainNotice(reason="the job is ending", answers_sigterm=True))
                )
            self._couriers.close()

    def _use_transport(self, transport: Transport) -> None:
        write_transport(make_private_dir(self._campaign.weights), transport)
        self._emit(TransportChanged(transport=transport.name, reason=transport.reason))
