"""The guardian: the batch script's process, which adopts every orphan of the job and cleans up after the driver, its
child, even if that was killed.

    run_guarded          fork, forward signals, wait, clean up, and only then record the outcome
    send_outcome         send the outcome to the guardian; without a guardian, clean up and record it
    EndTasks             run what may fail or hang: all of it together takes no longer than a limit
    sweep_nodes          remove what killed steps have left on any node
    release_components, cancel_components   end the jobs of components, after the driver or an earlier one
    cancel_reward_jobs   end the reward jobs of a driver that was killed
    CLOSE_GRACE_S, TERM_CLOSE_GRACE_S, OUTCOME_TIMEOUT_S, MAX_END_S, HUNG_CLOSE_GRACE_S, MAX_HUNG_END_S,
    MIN_TASK_S, RELEASE_TIMEOUT_S, SWEEP_TIMEOUT_S   constants
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import FrameType

import msgspec

from hpcrl.campaign_dir.job_end import EndCause, JobEnd
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.errors import HpcrlError
from hpcrl.job.batch_log import note_exception, note_in_log
from hpcrl.job.driver_pulse import FORWARDED_SIGNALS, MAX_SILENCE_S, PULSE_INTERVAL_S, DriverPulse
from hpcrl.job.job_notices import JobNotices
from hpcrl.plan.components import JobComponent
from hpcrl.plan.plan import Plan
from hpcrl.plan.records import read_plan, read_recipe, read_site
from hpcrl.slurm import next_job
from hpcrl.slurm.allocation import read_own_nodes, scrub_environment
from hpcrl.slurm.commands import SHORT_TIMEOUT_S, cancel_recorded_jobs, query_live_jobs
from hpcrl.slurm.component_jobs import cancel_component_jobs, read_component_ids, read_leases
from hpcrl.slurm.script import list_separate_components
from hpcrl.slurm.status import query_lost_nodes
from hpcrl.slurm.step_script import choose_step_python, read_step_setup
from hpcrl.system.exit_codes import EXIT_FAILED, encode_exit_code
from hpcrl.system.files import publish_file
from hpcrl.system.memory import count_oom_kills
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, end_groups, wait_for_descendants
from hpcrl.system.pulse import STACKS_GRACE_S
from hpcrl.weights.window.file import unlink_recorded_windows
from hpcrl.weights.window.shm_cleanup import remove_orphans

OUTCOME_TIMEOUT_S = 5.0
"""The time for which recording the outcome is tried on a full or unreachable file system."""
RELEASE_TIMEOUT_S = 10.0
"""The time for which the jobs of components may end by themselves."""
CLOSE_GRACE_S = 10.0
"""The time that processes may take to end."""
TERM_CLOSE_GRACE_S = 1.5
"""The time that they may take after SIGTERM, when SIGKILL is near."""
SWEEP_TIMEOUT_S = 15.0
MAX_END_S = 45.0
"""The time that all looks at files and all commands of Slurm at the end of a job may take together.

A file system or a Slurm that hangs must not keep the nodes, nor anything from being ended.
"""
HUNG_CLOSE_GRACE_S, MAX_HUNG_END_S = 5.0, 15.0
"""The same after a hang, which has taken its time already."""
MIN_TASK_S = 1.0
"""The time that each of them has even then."""


class EndTasks:
    """The tasks at the end of a job, which may fail or hang: all of it together takes no longer than a limit."""

    def __init__(self, *, limit_s: float) -> None:
        self._left_s = limit_s

    def run(self, task: Callable[[], object], *, least_s: float = MIN_TASK_S) -> None:
        """Run a task in a thread that does not keep this process, and print its error.

        A job that is left behind ends at its walltime, or when it finds no work.
        """
        thread = threading.Thread(target=_try_task, args=(task,), daemon=True)
        started = time.monotonic()
        thread.start()
        thread.join(max(self._left_s, least_s))
        self._left_s -= time.monotonic() - started


def _try_task(task: Callable[[], object]) -> None:
    try:
        task()
    except (HpcrlError, OSError) as error:
        note_in_log(f"hpcrl: {error}")
    except Exception:  # noqa: BLE001 - whatever it was, the rest of the end follows
        note_exception()


def run_guarded(drive: Callable[[int, DriverPulse], int], place: WorkerPlace, *, plan: Plan | None = None) -> int:
    """Run `drive` in a child, which writes its outcome to the given descriptor; return the exit code of the job.

    The sizes of `plan` are recorded with the outcome.
    """
    job, pulse, started_at = place.job, DriverPulse(place.job.root), time.monotonic()
    adopt_orphans()
    outcome_fd, driver_end = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # until they can be forwarded
    driver = os.fork()
    if driver == 0:
        os.close(outcome_fd)
        adopt_orphans()  # a driver whose guardian is killed ends them too
        # Slurm ends the job then, and this process at any moment: it must not answer the steps that ask for a driver.
        die_with_parent(signal.SIGKILL if "SLURM_JOB_ID" in os.environ else signal.SIGTERM)
        pulse.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # for its stacks; the others once it listens
        os._exit(drive(driver_end, pulse))
    os.close(driver_end)
    signals: set[int] = set()
    code = _wait_for_driver(driver, signals, pulse)
    has_hung = isinstance(code, str)
    tasks = EndTasks(limit_s=MAX_HUNG_END_S if has_hung else MAX_END_S)
    if isinstance(code, str):
        end = _end_hung_driver(driver, code, job=job, tasks=tasks, is_supervising=pulse.is_supervising)
    else:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        end = _describe_crash(code, f"the driver {how}", is_supervising=pulse.is_supervising)
    grace_s = HUNG_CLOSE_GRACE_S if has_hung else CLOSE_GRACE_S
    _clean_up(job, grace_s=TERM_CLOSE_GRACE_S if signal.SIGTERM in signals else grace_s, tasks=tasks)
    if signal.SIGTERM not in signals:
        tasks.run(lambda: sweep_nodes(job))
    end = msgspec.structs.replace(_read_sent_end(outcome_fd) or end, run_s=round(time.monotonic() - started_at, 1))
    if plan is not None:
        end = msgspec.structs.replace(end, num_nodes=plan.num_nodes, num_gpus=plan.num_gpus)
    _record_end(job, end, has_hung=has_hung, tasks=tasks)
    tasks.run(lambda: release_components(job))
    return EXIT_FAILED if isinstance(code, str) else encode_exit_code(code)


def _read_sent_end(outcome_fd: int) -> JobEnd | None:
    """Return what the driver has sent, if it did; a process that could not be ended may hold the other end."""
    os.set_blocking(outcome_fd, False)
    with contextlib.suppress(BlockingIOError, msgspec.MsgspecError):
        return msgspec.json.decode(os.read(outcome_fd, 1 << 16), type=JobEnd)
    return None


def _record_end(job: JobDir, end: JobEnd, *, has_hung: bool = False, tasks: EndTasks) -> None:
    """Record the end, then cancel or adapt the next job, and send the notices."""
    tasks.run(lambda: _publish_outcome(job, end.encode()), least_s=2 * OUTCOME_TIMEOUT_S)
    tasks.run(lambda: _settle_next_jobs(job, end, has_hung=has_hung))
    tasks.run(lambda: _send_notices(job, end))


def _settle_next_jobs(job: JobDir, end: JobEnd, *, has_hung: bool) -> None:
    """Cancel the jobs that wait where the campaign has ended, or let them avoid nodes that failed."""
    # Of an uncertain cause only the next job can learn more, from Slurm: it sees then whether there is anything to do.
    is_certain = has_hung or end.likely_cause not in next_job.UNCERTAIN_CAUSES or job.campaign.stop.exists()
    if is_certain and next_job.campaign_outcome(job) is not None:
        next_job.cancel_next_jobs(job)
    elif job.next_job.submission.exists():
        next_job.avoid_nodes(job, plan=read_plan(job.campaign), site=read_site(job.campaign))


def send_outcome(end: JobEnd, *, outcome_fd: int, job: JobDir) -> None:
    """Send the driver's outcome to the guardian; if the guardian was killed, do its work: clean up and record it."""
    record = msgspec.structs.replace(end, time=time.time()).encode()
    try:
        os.write(outcome_fd, record)
    except BrokenPipeError:
        tasks = EndTasks(limit_s=MAX_END_S)
        _clean_up(job, grace_s=CLOSE_GRACE_S, tasks=tasks)
        tasks.run(lambda: _publish_outcome(job, record), least_s=2 * OUTCOME_TIMEOUT_S)
        tasks.run(lambda: release_components(job))
        tasks.run(lambda: _send_notices(job, end))


def _send_notices(job: JobDir, end: JobEnd) -> None:
    JobNotices(job, read_recipe(job.campaign).notices).report_end(end)


def _publish_outcome(job: JobDir, record: bytes) -> None:
    """Record the outcome; where the file system refuses it for long, it is in the batch log."""
    deadline = time.monotonic() + OUTCOME_TIMEOUT_S
    while True:
        try:
            publish_file(job.outcome, record)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(OUTCOME_TIMEOUT_S / 10)
                continue
            note_in_log(f"hpcrl: {error}: the outcome is {record.decode()}")
        return


def _describe_crash(code: int, reason: str, *, is_supervising: bool) -> JobEnd:
    """Return the record of a driver that has sent none: the kernel kills processes where memory is short."""
    is_short = code == -signal.SIGKILL and bool(count_oom_kills())
    cause: EndCause = "out-of-memory" if is_short else "infrastructure" if is_supervising else "not-started"
    return JobEnd(outcome="failed", reason=reason, cause=cause, time=time.time())


def release_components(job: JobDir) -> None:
    """Let the jobs that hold the nodes of components end, which see the outcome, and cancel those that are left.

    A job whose lease has gone ends within moments, but Slurm would count it as cancelled until then.
    """
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while job.list_leases() and time.monotonic() < deadline:
        time.sleep(PULSE_INTERVAL_S)
    ids = read_component_ids(job)
    while query_live_jobs(ids) != {} and time.monotonic() < deadline:
        time.sleep(1.0)
    cancel_component_jobs(job)


def cancel_components(job: JobDir) -> None:
    """End the jobs of components of an earlier job that have left leases: if all was killed, some may still run."""
    if job.list_leases():
        _try_task(lambda: cancel_component_jobs(job))


def cancel_reward_jobs(job: JobDir) -> None:
    """End the reward jobs of a job whose driver was killed: queued ones could wait for days, then find no work."""
    _try_task(lambda: cancel_recorded_jobs(job.reward_jobs))


def _wait_for_driver(driver: int, signals: set[int], pulse: DriverPulse) -> int | str:
    """Wait for the driver, forwarding `signals`; return its exit code, or why it counts as hung."""

    def forward(number: int, _: FrameType | None) -> None:
        signals.add(number)
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            # Either is a warning that the job will end; in the driver SIGUSR1 has another meaning.
            os.kill(driver, signal.SIGUSR2 if number == signal.SIGUSR1 else number)

    for sig in FORWARDED_SIGNALS:
        signal.signal(sig, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    looked_at = since = time.monotonic()
    result: int | str | None = None
    while result is None:
        ended, status = os.waitpid(driver, os.WNOHANG)
        now = time.monotonic()
        if now - looked_at > MAX_SILENCE_S / 4:  # the whole node stood still, or Slurm had suspended the job
            since = now
        looked_at = now
        result = os.waitstatus_to_exitcode(status) if ended else pulse.describe_hang(driver, since=since)
        if result is None:
            time.sleep(PULSE_INTERVAL_S)
    for sig in FORWARDED_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)  # the job is already ending
    return result


def _end_hung_driver(driver: int, reason: str, *, job: JobDir, tasks: EndTasks, is_supervising: bool) -> JobEnd:
    """Let all processes write their stacks, kill the driver and return the record of its end."""
    tasks.run(lambda: note_in_log(f"hpcrl: {reason}: its stacks follow"))
    os.kill(driver, signal.SIGUSR1)
    os.kill(driver, signal.SIGCONT)  # a process that was stopped writes no stacks
    tasks.run(lambda: publish_file(job.dump_stacks, ""))
    time.sleep(STACKS_GRACE_S)
    os.kill(driver, signal.SIGKILL)
    reason = f"{reason}; the stacks are in {job.logs}"
    cause: EndCause = "infrastructure" if is_supervising else "not-started"
    return JobEnd(outcome="failed", reason=reason, cause=cause, time=time.time())


def _clean_up(job: JobDir, *, grace_s: float, tasks: EndTasks) -> None:
    """End everything that the driver started."""
    tasks.run(lambda: publish_file(job.end, ""))  # a driver that was killed could not ask its steps to end
    wait_for_descendants(timeout_s=grace_s)
    end_descendants(grace_s=grace_s)
    tasks.run(lambda: unlink_recorded_windows(job))
    tasks.run(remove_orphans)
    tasks.run(lambda: cancel_reward_jobs(job))


def sweep_nodes(job: JobDir) -> None:
    """Remove what steps that were killed have left, by one short step on all nodes; a lost one may hang it."""
    if "SLURM_JOB_ID" not in os.environ:
        return
    plan = read_plan(job.campaign)
    if len(read_leases(job, plan)) < len(list_separate_components(plan)):
        return  # one has not started, so no steps have
    allocation, environ = read_own_nodes(plan, job), dict(os.environ)
    scrub_environment(environ)
    every = sorted({node for names in allocation.nodes for node in names})
    for node in query_lost_nodes(every, env=environ, timeout_s=SHORT_TIMEOUT_S):  # Slurm would start it on none
        allocation = allocation.without_node(node)

    def make_words(component: JobComponent) -> list[str]:
        setup = read_step_setup(job.campaign, component.partition)
        return [*setup.srun_flags, *setup.words, choose_step_python(setup), "-m", "hpcrl.job.step", str(job.root)]

    sweeps = [
        subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
        for command in allocation.node_step_commands(plan.components, make_words, mpi="none")
    ]
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    for sweep in sweeps:
        with contextlib.suppress(subprocess.TimeoutExpired):
            sweep.wait(max(deadline - time.monotonic(), 0.0))
    end_groups(sweeps, grace_s=0.0)
