"""The entry point of every worker, as a Parsl task or as a step.

work            the Parsl task
run_step        the same, in a process that ends then
import_role     import what the workers of a role need
main            the step: `python -m hpcrl.roles ROLE CAMPAIGN JOB INDEX`
describe_failure  why a worker fails
await_files     after an error of the file system that passes, wait until it has passed
outlive_grace   let SIGTERM end this process only where its step is to end
QuickExit       ends the step without the teardown of the interpreter
"""

import atexit
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from hpcrl.campaign_dir.events import WorkerEnded, WorkerFailed, WorkerStarted
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.config.recipe import JUDGE_ROLE_PREFIX, ROLES, RoleName
from hpcrl.plan.records import read_plan, read_recipe, read_site
from hpcrl.roles.context import open_context, pin_devices, redirect_output
from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.file_watch import PATIENCE_S, is_outage, is_passing, retry_passing
from hpcrl.system.garbage import pause_collection
from hpcrl.system.memory import KILLED, KillWatch
from hpcrl.system.package_names import answer_quickly
from hpcrl.system.variables import PROGRESS_BARS_VARIABLE, TRAINER_START_VARIABLE

MODULES = {"prefill": "serve", "decode": "serve"}
"""The modules of roles whose module has another name."""


def work(campaign: str, job_number: int, role: RoleName, index: int) -> int:
    """Run one worker until the job ends; heavy packages are imported only after devices are pinned."""
    campaign_dir = CampaignDir(Path(campaign))
    job = campaign_dir.job(job_number)
    retry_passing(lambda: redirect_output(job, role, index), timeout_s=PATIENCE_S, passes=is_outage)
    if role != "train" and retry_passing(job.drain.exists, timeout_s=PATIENCE_S, passes=is_outage):
        return 0  # it has waited for a place until now, and would end as soon as it has started
    plan = read_plan(campaign_dir)
    component = plan.components[plan.role(role).component]
    devices = pin_devices(plan.role(role), read_site(campaign_dir).partitions[component.partition].gpu_variable)
    context = open_context(campaign_dir, job_number, role, index)
    context.events.emit(WorkerStarted(pid=os.getpid(), gpus=devices))
    kills = KillWatch()
    _restart_random_numbers()
    try:
        with pause_collection(), answer_quickly():
            worker = importlib.import_module(_name_module(role))
        code: int = worker.run(context) or 0
    except Exception as error:  # noqa: BLE001 - whatever it was, the driver must be able to read it
        traceback.print_exc()
        await_files(job.root, error)
        reason = describe_failure(error, kills)
        context.events.emit(WorkerFailed(of=context.name, reason=reason))
        raise RuntimeError(reason) from None  # a plain exception reaches the driver whatever packages it has
    context.events.emit(WorkerEnded(reason="the job is ending"))
    return code


def import_role(campaign: str, role: RoleName) -> None:
    """Import what the workers of a role need, in the process that forks them: nothing else, and no threads."""
    directory = CampaignDir(Path(campaign))
    plan, recipe = read_plan(directory), read_recipe(directory)
    if plan.has_role(role):
        os.environ["OMP_NUM_THREADS"] = str(plan.role(role).cpus_per_worker)  # as in `pin_devices`
    os.environ.setdefault(PROGRESS_BARS_VARIABLE, "1")
    judge = recipe.judge.get(role.removeprefix(JUDGE_ROLE_PREFIX)) if role.startswith(JUDGE_ROLE_PREFIX) else None
    engine = judge.engine if judge is not None else recipe.engine if role in MODULES else None
    with pause_collection(), answer_quickly(), _keep_single_thread():
        importlib.import_module(_name_module(role))
        if engine is not None and engine.backend == "embedded":
            importlib.import_module("hpcrl.engines.embedded.engine")


@contextlib.contextmanager
def _keep_single_thread() -> Iterator[None]:
    """Let numpy start no threads when it is imported, unless the user has chosen their number."""
    if "OPENBLAS_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]


def _name_module(role: RoleName) -> str:
    return f"hpcrl.roles.{'judge' if role.startswith(JUDGE_ROLE_PREFIX) else MODULES.get(role, role)}"


def _restart_random_numbers() -> None:
    """Give a process that was forked its own random numbers; Python's own module does so by itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def describe_failure(error: Exception, kills: KillWatch) -> str:
    """Return why a worker fails: maybe since the kernel has ended what it had started, such as a server of vLLM."""
    reason = f"{type(error).__name__}: {error}"
    return f"{reason} ({KILLED})" if kills.has_killed() else reason


def await_files(directory: Path, error: BaseException | None) -> None:
    """Wait until the file system works if it has caused `error`: started earlier, the worker would fail again."""
    while error is not None:
        if isinstance(error, OSError) and is_passing(error):
            with contextlib.suppress(OSError):  # it is away for longer than anything waits
                retry_passing(lambda: list(directory.iterdir()), timeout_s=PATIENCE_S)
            return
        error = error.__cause__ or error.__context__


def outlive_grace(job: JobDir) -> None:
    """Let SIGTERM end this process only where its step is to end.

    Some sites send it to every process of a job, at the start of a grace time: the checkpoint is made in that time.
    """
    ends = (job.end, job.trainer_end(int(os.environ.get(TRAINER_START_VARIABLE, "0"))))

    def end_if_asked(number: int, _: object) -> None:
        if any(end.exists() for end in ends):
            os._exit(encode_exit_code(-number))

    signal.signal(signal.SIGTERM, end_if_asked)


class QuickExit:
    """The exit handler that runs last, if made first: it skips the teardown of the interpreter, a second with torch."""

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code; None while the process may only end by an exception, which is left to the interpreter."""
        atexit.register(self._end)

    def _end(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


def main() -> int:
    role, campaign, job_number, index = sys.argv[1:5]
    if role not in ROLES:
        raise SystemExit(f"unknown role {role!r}: expected one of {', '.join(ROLES)}")
    outlive_grace(CampaignDir(Path(campaign)).job(int(job_number)))
    return work(campaign, int(job_number), role, int(index))


def run_step() -> None:
    """Run the step of this process, which ends with its code once it returns."""
    quick_exit = QuickExit()
    quick_exit.code = main()


if __name__ == "__main__":
    run_step()
