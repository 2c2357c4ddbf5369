"""The context of a worker: its place in the plan, its events, its log, its devices, and requests to end.

WorkerContext           one worker of one role in one job
open_context            read the campaign and start the heartbeat
make_judge_report       reports failures of judges as events
redirect_output         send all output of the process to the worker's log
pin_devices             give the worker its devices and cores
ROLE_ROUND_INTERVAL_S   the time between two rounds of an env, engine or judge worker's loop
REQUEST_LOOK_INTERVAL_S, TRAINER_PAUSE_S   the times between looks for requests
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.paths import CampaignDir, JobDir, make_worker_name
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import EngineConfig, Recipe, RoleName
from hpcrl.config.site import DEVICE_VARIABLES, STEP_DEVICE_VARIABLES, DeviceVariable, Site
from hpcrl.errors import ConfigError
from hpcrl.hardware.gpus import DEFAULT_SIMULATED_GPU, GPU_CATALOGUE, GpuModel
from hpcrl.plan.plan import Plan, RolePlan
from hpcrl.plan.records import read_plan, read_recipe, read_site
from hpcrl.system.file_watch import MAX_PAUSE_S, NameWatch
from hpcrl.system.near_cores import bind_near_gpus
from hpcrl.system.network import current_node, find_bind_address
from hpcrl.system.pulse import start_pulse
from hpcrl.system.variables import PARTITION_VARIABLE, PROGRESS_BARS_VARIABLE
from hpcrl.system.wakeups import WakeEvent, WakeListener, WakeSender

ROLE_ROUND_INTERVAL_S = 0.1
REQUEST_LOOK_INTERVAL_S = 0.25
TRAINER_PAUSE_S = 0.5
"""The trainer is one process, and has the most to do before the end: it looks more often."""


@dataclass
class WorkerContext:
    """The context of one worker of one role in one job."""

    campaign: CampaignDir
    job: JobDir
    role: RoleName
    index: int
    recipe: Recipe
    site: Site
    plan: Plan
    events: EventLog
    end_requested: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        longest_s = TRAINER_PAUSE_S if self.role == "train" else MAX_PAUSE_S
        self._requests = NameWatch(self.job.root, longest_s=longest_s)

    @property
    def name(self) -> str:
        """The name of this worker, unique in the campaign: job, role, index."""
        return make_worker_name(self.job.number, self.role, self.index)

    @property
    def place(self) -> WorkerPlace:
        return WorkerPlace(self.job, current_node())

    @property
    def role_plan(self) -> RolePlan:
        return self.plan.role(self.role)

    @property
    def partition(self) -> str:
        """The partition of this worker's node, by the site's name."""
        return os.environ.get(PARTITION_VARIABLE, self.plan.components[self.role_plan.component].partition)

    @property
    def stall_s(self) -> float:
        """The longest time in which a worker may do nothing of its work."""
        return self.recipe.job.stall_timeout_min * 60

    @property
    def certificate(self) -> Path | None:
        """The certificate of servers that other nodes reach; None without TLS."""
        return self.campaign.certificate if self.site.network.tls else None

    def find_address(self) -> str:
        """Return the address of this node at which other nodes reach it."""
        return find_bind_address(self.site.list_interfaces(self.partition))

    def choose_gpu(self, engine: EngineConfig) -> str | None:
        """Return the GPU that this worker uses for an engine, or that the engine simulates."""
        role, simulated = self.role_plan, engine.sim.gpus
        real = self.plan.components[role.component].gpu if role.gpus_per_worker else None
        if engine.backend != "sim":
            return real
        return self._choose_simulated(simulated[self.index % len(simulated)] if simulated else real).name

    def choose_simulated_gpu(self, engine: EngineConfig) -> GpuModel:
        """Return the figures of the GPU that a simulated engine imitates."""
        return self._choose_simulated(self.choose_gpu(engine))

    def _choose_simulated(self, name: str | None) -> GpuModel:
        gpu = self.site.find_gpu(name)
        return gpu if gpu is not None and gpu.has_speed else GPU_CATALOGUE[DEFAULT_SIMULATED_GPU]

    @property
    def draining(self) -> bool:
        """True once the job is to end: start nothing new, seal what is there."""
        return self.end_requested.is_set() or self.has_request(self.job.drain)

    def is_ending(self) -> bool:
        """Return whether the job is to end, by a look at this moment: other workers may have noticed it before."""
        self._requests.expect_change()
        return self.draining

    def has_request(self, request: Path) -> bool:
        """Return whether the driver has published a request, a file of the job's directory."""
        return request.name in self._requests.names()

    async def await_model(self, wakeups: WakeEvent) -> bool:
        """Wait until the trainer has made the model directory; return False if the job ends before."""
        names = NameWatch(self.campaign.root)
        while self.campaign.model.name not in names.names():
            if self.draining:
                return False
            if await wakeups.wait(REQUEST_LOOK_INTERVAL_S):
                names = NameWatch(self.campaign.root)
        return True

    @contextlib.contextmanager
    def open_wakeups(self) -> Iterator[WakeEvent]:
        """Return what ends the waits of this worker's event loop, also when another process wakes it."""
        wakeups, listener = WakeEvent(), self.open_listener()
        if listener is None:
            yield wakeups
            return
        wakeups.attach(listener)
        try:
            yield wakeups
        finally:
            wakeups.detach(listener)
            listener.close()

    def open_listener(self) -> WakeListener | None:
        """Let other processes wake this worker; None where it cannot listen, and only polls."""
        try:
            return WakeListener(self.job.wakeups, f"{self.role}-{self.index}", host=self.find_address())
        except (OSError, ConfigError):
            return None

    def make_sender(self, *roles: str) -> WakeSender:
        """Return what wakes all workers of some roles."""
        host = None
        with contextlib.suppress(ConfigError):
            host = self.find_address()
        return WakeSender(self.job.wakeups, *(f"{role}-" for role in roles), host=host)

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the job is to end."""
        self.end_requested.wait(seconds)


def open_context(campaign: CampaignDir, job_number: int, role: RoleName, index: int) -> WorkerContext:
    """Read the campaign, open this worker's event log, and start its pulse and its heartbeat."""
    job = campaign.job(job_number)
    plan = read_plan(campaign)
    component = plan.components[plan.role(role).component]
    events = EventLog.open(
        campaign,
        role,
        index,
        job=job_number,
        role=role,
        node=current_node(),
        partition=os.environ.get(PARTITION_VARIABLE, component.partition),
    )
    context = WorkerContext(
        campaign=campaign,
        job=job,
        role=role,
        index=index,
        recipe=read_recipe(campaign),
        site=read_site(campaign),
        plan=plan,
        events=events,
    )
    start_pulse(rank=int(os.environ.get("PARSL_WORKER_RANK", "0")), silence_s=context.recipe.job.silence_s)
    threading.Thread(target=_run_heartbeat, args=(context,), name="beat", daemon=True).start()
    return context


def make_judge_report(context: WorkerContext) -> Callable[[str], None]:
    """Return a function that reports what a worker's proxy to the judges has met, until the job ends: so do judges."""

    def report(problem: str) -> None:
        if not context.is_ending():
            context.events.emit(FaultReported(what="judge", detail=problem))

    return report


def redirect_output(job: JobDir, role: str, index: int) -> None:
    """Send all further output of this process, and the stacks of a fatal signal, to the worker's log."""
    fd = os.open(job.log(f"{role}-{index}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.environ.setdefault(PROGRESS_BARS_VARIABLE, "1")  # transformers' bars, of which a log would have each state
    faulthandler.enable(file=2)


def pin_devices(role: RolePlan, variable: DeviceVariable | None = None) -> list[str]:
    """Restrict this worker to its devices of the node, and to the cores near them; call it before torch is imported.

    Where nothing names the devices of the step, the node has them all; several roles may share them. One variable is
    left in the end: AMD's runtime would apply HIP's and CUDA's to what ROCr's has left.
    """
    os.environ["OMP_NUM_THREADS"] = str(role.cpus_per_worker)
    given = {name: value.split(",") for name in DEVICE_VARIABLES if (value := os.environ.get(name))}
    name = variable if variable is not None else next(iter(given), DEVICE_VARIABLES[0])
    if not role.gpus_per_worker:
        return given.get(name, [])
    every = [str(number) for number in range(role.first_gpu + role.workers_per_node * role.gpus_per_worker)]
    visible = given.get(name) or next(iter(given.values()), every)
    rank = int(os.environ.get("PARSL_WORKER_RANK", "0"))
    first = role.first_gpu + rank * role.gpus_per_worker
    own = visible[first : first + role.gpus_per_worker]
    for other in STEP_DEVICE_VARIABLES:
        os.environ.pop(other, None)
    os.environ[name] = ",".join(own)
    bind_near_gpus(own, num_cpus=role.cpus_per_worker)
    return own


def _run_heartbeat(context: WorkerContext) -> None:
    """Update the heartbeat and check for the driver's requests: to drain, to dump stacks."""
    dumped = False
    while True:
        context.events.beat()
        with contextlib.suppress(OSError):  # this thread must not end
            if context.has_request(context.job.drain):
                context.end_requested.set()
            if context.has_request(context.job.dump_stacks) and not dumped:
                faulthandler.dump_traceback(file=2, all_threads=True)
                dumped = True
        time.sleep(REQUEST_LOOK_INTERVAL_S)
