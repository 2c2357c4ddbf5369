"""What every worker is given: its place in the plan, its events, its log, its devices, and the wish to end."""

import faulthandler
import os
import sys
import threading
import time
from dataclasses import dataclass, field

import msgspec

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import JobDir, RunDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import Site
from hpcrl.plan.plan import Plan, RolePlan
from hpcrl.system.network import this_node
from hpcrl.system.variables import PARTITION_VARIABLE

BEAT_S = 2.0


@dataclass
class Context:
    """One worker of one role in one job."""

    run: RunDir
    job: JobDir
    role: RoleName
    index: int
    recipe: Recipe
    site: Site
    plan: Plan
    events: EventLog
    ending: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """Unique in the campaign: job, role, index."""
        return worker_name(self.job, self.role, self.index)

    @property
    def place(self) -> WorkerPlace:
        return WorkerPlace(self.run, self.job, this_node())

    @property
    def role_plan(self) -> RolePlan:
        return self.plan.role(self.role)

    @property
    def draining(self) -> bool:
        """True once the job is to end: begin nothing new, seal what is there."""
        return self.ending.is_set() or self.job.drain.exists()

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than until the job is to end."""
        self.ending.wait(seconds)


def worker_name(job: JobDir, role: str, index: int) -> str:
    """The name of a worker in events, endpoints and spools."""
    return f"{job.number:03d}-{role}-{index}"


def open_context(run: RunDir, job_number: int, role: RoleName, index: int) -> Context:
    """Read the campaign, open this worker's events, and begin to beat."""
    job = run.job(job_number)
    plan = msgspec.json.decode(run.plan.read_bytes(), type=Plan)
    component = plan.components[plan.role(role).component]
    name = worker_name(job, role, index)
    events = EventLog(
        run.events / f"{name}.jsonl",
        job=job_number,
        role=role,
        worker=name,
        node=this_node(),
        partition=os.environ.get(PARTITION_VARIABLE, component.partition),
    )
    context = Context(
        run=run,
        job=job,
        role=role,
        index=index,
        recipe=msgspec.json.decode(run.recipe.read_bytes(), type=Recipe),
        site=msgspec.json.decode(run.site.read_bytes(), type=Site),
        plan=plan,
        events=events,
    )
    threading.Thread(target=_beat, args=(context,), name="beat", daemon=True).start()
    return context


def log_to(job: JobDir, role: str, index: int) -> None:
    """From now on, all that this process prints goes to the worker's log; so do the stacks of a fatal signal."""
    fd = os.open(job.log(f"{role}-{index}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable(file=2)


def pin(role: RolePlan) -> list[str]:
    """Give this worker its own devices of the node and its share of cores; before torch is imported."""
    os.environ["OMP_NUM_THREADS"] = str(role.cpus_per_worker)
    given = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if not given or not role.gpus_per_worker:
        return given
    rank = int(os.environ.get("PARSL_WORKER_RANK", "0"))
    own = given[rank * role.gpus_per_worker : (rank + 1) * role.gpus_per_worker]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return own


def _beat(context: Context) -> None:
    """Show that this worker lives, and hear what the driver wants."""
    dumped = False
    while True:
        context.events.beat()
        if context.job.drain.exists():
            context.ending.set()
        if context.job.dump_stacks.exists() and not dumped:
            faulthandler.dump_traceback(file=2, all_threads=True)
            dumped = True
        time.sleep(BEAT_S if not context.ending.is_set() else BEAT_S * 5)
