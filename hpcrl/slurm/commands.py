"""Run Slurm's commands: the one place that runs sbatch, squeue, scancel, scontrol, sacct and sinfo.

run_slurm, ask_slurm    run one command with a time limit, without variables that would change its meaning
limited_command         the same as a list of words, for submitit, which starts sbatch itself
check_answer            raise SlurmError, with a fix, for a command that was refused or did not answer
expand_nodes            `cpu[1-3]` as a list
try_slurm               run one that may not even start
queue_script            submit a script with sbatch, once
queue_new_script        the same where no earlier try can have left a job
find_marked_job, await_marked_job, is_unanswered   find a job by its comment, if sbatch did not answer
queue_recorded_script   submit a script and record the id of its job
query_live_jobs         ask squeue which jobs wait or run
cancel_jobs             end jobs with scancel
cancel_steps            end steps whose srun was killed
find_step_failure, StepFailure    the line by which srun reports that Slurm or a node has failed a step
cancel_recorded_jobs    end the recorded jobs of a driver that was killed
COMMAND_TIMEOUT_S, SHORT_TIMEOUT_S   time limit of one command
TIMED_OUT               exit code of a command that did not answer
MAX_NODES               longest range in a node list

A running job queues other jobs through this module: reward jobs (one node each, preemptible, only while there is work
for them) and the next job of the campaign, a whole het job. Only recorded ids are ever queried or ended.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.errors import LostAnswerError, SlurmError

COMMAND_TIMEOUT_S = float(os.environ.get("HPCRL_SLURM_TIMEOUT_S", "40"))
"""The time that one Slurm command may take to answer; a caller that only displays the answer may set less."""
SHORT_TIMEOUT_S = 10.0
"""The time that a command may take for which the driver waits in the middle of its work."""
TIMED_OUT = 124
"""The exit code of coreutils' timeout; `run_slurm` uses it too for a command that did not answer."""
NUM_LOOKUPS = 5
LOOKUP_INTERVAL_S = 4.0
"""The number of looks for a job whose submission was not answered, and the time between them."""
MAX_NODES = 100_000
"""The most nodes in one range of a node list: a longer range is garbage."""

_LOST_ANSWERS = ("Socket timed out", "Unable to contact slurm controller", "Zero Bytes were transmitted")
"""The messages of an sbatch that has lost the connection; the controller may have taken the job."""
_GONE = ("Invalid job id specified", "already completing or completed")
"""The messages of scancel about a job that has ended: some versions fail with them."""
_STEP_FAILURES = (
    *_LOST_ANSWERS,
    *("Unable to create step", "Unable to confirm allocation", "Task launch for", "Application launch failed"),
    *("Communication connection failure", "Connection refused", "Connection timed out", "No route to host"),
    *("DUE TO NODE FAILURE", "Node failure on"),
)
"""The messages of srun about a step that Slurm could not start, or whose node was lost."""
_FAILED_NODE = re.compile(r"(?:on node|Node failure on) ([\w.-]+)|STEP \S+ ON ([\w.-]+) CANCELLED")
_SETTINGS = ("SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
"""Variables with these prefixes act as options of a command."""


def run_slurm(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run one command and return its result; the exit code is TIMED_OUT without an answer in time.

    `env` is the environment to start from (default: this process's). Raise SlurmError if the command does not exist:
    waiting would not help.
    """
    environment = _clean_environment(os.environ if env is None else env, command)
    try:
        # A separate session: sites wrap these commands, and the whole wrapper must end when the time is up.
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SlurmError(
            f"{command[0]} cannot be run ({error.strerror}; PATH={environment.get('PATH', '')}): run this on a login "
            "node of the site, load its Slurm module, or start the lab with `hpcrl lab up`"
        ) from error
    with child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(
                command, TIMED_OUT, "", f"{command[0]} did not answer within {timeout_s:g} s"
            )
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(
        command, child.returncode, out.decode(errors="replace"), err.decode(errors="replace")
    )


def try_slurm(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run one command on which a job must not depend: one that cannot be started, as on a full node, gave no answer."""
    try:
        return run_slurm(command, env=env, timeout_s=timeout_s)
    except SlurmError as error:
        return subprocess.CompletedProcess(command, TIMED_OUT, "", str(error))


def ask_slurm(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
    """Run one command and return its output; raise SlurmError if it was refused or did not answer."""
    done = run_slurm(command, env=env)
    check_answer(command[0], done.returncode, done.stderr or done.stdout)
    return done.stdout


def limited_command(command: Sequence[str], *, env: Mapping[str, str]) -> list[str]:
    """Return the words that run a command with the environment and the time limit of `run_slurm`."""
    wanted = _clean_environment(env, command)
    unset = [word for name in os.environ if name not in wanted for word in ("-u", name)]
    exports = [f"{name}={value}" for name, value in wanted.items() if os.environ.get(name) != value]
    return ["env", *unset, *exports, "timeout", str(COMMAND_TIMEOUT_S), *command]


def check_answer(command: str, code: int | None, text: str) -> None:
    """Raise SlurmError if `command`, which printed `text`, ended with a code other than 0."""
    if code != 0:
        raise SlurmError(_explain_failure(command, code, text))


def _explain_failure(command: str, code: int | None, text: str) -> str:
    """Return why a command failed, for users."""
    if code == TIMED_OUT:
        return f"{command} did not answer within {COMMAND_TIMEOUT_S:g} s: is slurmctld up? Try again later"
    return _explain_refusal(text, command)


def _explain_refusal(text: str, command: str) -> str:
    """Return Slurm's reason, with a fix for the usual ones."""
    lines = [line for line in text.splitlines() if f"{command}: error" in line]
    reason = "; ".join(line.partition("error: ")[2] for line in lines) or text.strip() or "no reason given"
    if any(words in text for words in ("failed to fetch config", "Could not establish a configuration source")):
        return f"{command} finds no cluster here (a slurm.conf is missing): run this on a login node"
    fixes = {
        "Unable to contact slurm controller": "the controller is down or slurm_conf points elsewhere: try again later",
        "nvalid account": "give the account that this partition charges: -s site.account=...",
        "nvalid partition": "correct slurm_partition in the site file (sinfo lists the partitions)",
        "configuration is not available": "no node has that much: `hpcrl plan` shows what is requested",
        "operation not supported": "if it runs no heterogeneous jobs: -s job.layout=hetstep requests one allocation",
    }
    fixes = dict.fromkeys(_LOST_ANSWERS, "the connection to the controller was lost: try again later") | fixes
    unknown = "nothing was queued" if command == "sbatch" else f"the answer of {command}"
    fix = next((fix for words, fix in fixes.items() if words in reason), unknown)
    return f"Slurm refused: {reason} ({fix})"


def _clean_environment(env: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """Remove variables that act as options of a command, and those that describe the job this process is in."""
    removed = (*_SETTINGS, "SLURM_") if "SLURM_JOB_ID" in env else _SETTINGS
    kept = {name: value for name, value in env.items() if name == "SLURM_CONF" or not name.startswith(removed)}
    if Path(command[0]).name == "sbatch":  # its environment becomes the job's
        return kept
    return kept | {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}


def expand_nodes(nodelist: str) -> list[str]:
    """Expand `gpu[01-03,7],login` to a list of names."""
    parts = re.split(r",(?![^\[]*\])", nodelist)
    return list(itertools.chain.from_iterable(_expand_name(part) for part in parts if part))


def _expand_name(name: str) -> list[str]:
    found = re.fullmatch(r"(?P<before>[^\[]*)\[(?P<ranges>\d+(-\d+)?(,\d+(-\d+)?)*)\](?P<after>.*)", name)
    if found is None:
        return [name]
    numbers: list[str] = []
    for part in found["ranges"].split(","):
        low, _, high = part.partition("-")
        if high and int(high) - int(low) > MAX_NODES:
            return [name]
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high or low) + 1)]
    return [f"{found['before']}{n}{after}" for n in numbers for after in _expand_name(found["after"])]


def queue_script(script: Path, *options: str, mark: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Submit a script to Slurm unless a job of an earlier try is queued, and return the id of its job.

    Such a job is found by `mark`, the comment of this job and no other.
    """
    known = None if mark is None else find_marked_job(mark, env=env)
    return queue_new_script(script, *options, mark=mark, env=env) if known is None else known


def queue_new_script(script: Path, *options: str, mark: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Submit a script to Slurm and return the id of its job.

    sbatch may fail though the job is queued: it is found by its `mark`. Raise LostAnswerError if it may be queued and
    is not found.
    """
    done = run_slurm(["sbatch", "--parsable", *options, str(script)], env=env)
    if mark is not None and is_unanswered(done.returncode, done.stderr):
        return await_marked_job(mark, code=done.returncode, answer=done.stderr, env=env)
    check_answer("sbatch", done.returncode, done.stderr or done.stdout)
    return done.stdout.strip().partition(";")[0]


def is_unanswered(code: int, text: str) -> bool:
    """Return whether sbatch failed without an answer: the job may be queued."""
    return code == TIMED_OUT or (code != 0 and any(words in text for words in _LOST_ANSWERS))


def await_marked_job(mark: str, *, code: int, answer: str, env: Mapping[str, str] | None = None) -> str:
    """Look for a job whose submission ended so, several times, and return its id.

    Raise LostAnswerError if it is not found: it may be queued even later.
    """
    for attempt in range(NUM_LOOKUPS):
        time.sleep(LOOKUP_INTERVAL_S if attempt else 0.0)
        with contextlib.suppress(SlurmError):
            if (known := find_marked_job(mark, env=env)) is not None:
                return known
    reason = _explain_failure("sbatch", code, answer)
    raise LostAnswerError(f"{reason}; the job may still be queued: `squeue --me` shows it")


def find_marked_job(mark: str, *, env: Mapping[str, str] | None = None) -> str | None:
    """Return the id of this user's job with such a comment that waits or runs; None if there is none.

    Raise SlurmError if squeue does not answer.
    """
    done = run_slurm(["squeue", "-h", "--me", "-o", "%i %k"], env=env)
    if done.returncode != 0:
        raise SlurmError(
            f"squeue does not answer whether the job is in the queue ({(done.stderr or done.stdout).strip()}): try "
            "again later"
        )
    rows = (line.partition(" ") for line in done.stdout.splitlines())
    return next((id.partition("+")[0] for id, _, comment in rows if comment.strip() == mark), None)


def queue_recorded_script(script: Path, *, record: Path) -> str:
    """Submit a script, append the id of its job to `record` and return the id."""
    id = queue_script(script)
    with os.fdopen(os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
        file.write(f"{id}\n")
    return id


def query_live_jobs(ids: Sequence[str]) -> dict[str, bool] | None:
    """Map each job that waits or runs to True if it runs; ended jobs are absent. None: Slurm did not answer."""
    if not ids:
        return {}
    done = try_slurm(["squeue", "-h", "--me", "-o", "%A %T"], timeout_s=SHORT_TIMEOUT_S)
    if done.returncode != 0:
        return None
    states = dict(row.split(maxsplit=1) for row in done.stdout.split("\n") if row)
    return {id: states[id].strip() == "RUNNING" for id in ids if id in states and states[id].strip() != "COMPLETING"}


def cancel_jobs(ids: Iterable[str], *, env: Mapping[str, str] | None = None) -> None:
    """End jobs; jobs that have already ended, or that Slurm no longer lists, are ignored."""
    wanted = list(ids)
    if not wanted:
        return
    done = run_slurm(["scancel", *wanted], env=env)
    answer = done.stderr or done.stdout
    errors = [line for line in answer.splitlines() if "error" in line]
    if errors and all(any(words in line for words in _GONE) for line in errors):
        return
    check_answer("scancel", done.returncode, answer)


def cancel_steps(name: str) -> None:
    """End this user's steps with such a name: where srun was killed, what it had started continues.

    The steps of a component are listed under its own id, which the job does not have: a name must be that of one job.
    """
    listed = try_slurm(["squeue", "-h", "-s", "--me", "-o", "%i %j"], timeout_s=SHORT_TIMEOUT_S)
    rows = (line.partition(" ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else ()
    ids = [id for id, _, step in rows if step.strip() == name]
    if ids:
        try_slurm(["scancel", *ids], timeout_s=SHORT_TIMEOUT_S)


class StepFailure(NamedTuple):
    """A step that ended for a reason other than its command."""

    line: str
    node: str | None
    """The node that is named as the cause."""


def find_step_failure(text: str) -> StepFailure | None:
    """Return the first line of srun's output that blames Slurm or a node; None if there is none.

    Lines about the tasks themselves, as "n1: task 0: Exited with exit code 1", blame neither.
    """
    for line in text.splitlines():
        if line.startswith(("srun: ", "slurmstepd: ")) and any(words in line for words in _STEP_FAILURES):
            found = _FAILED_NODE.search(line)
            return StepFailure(line, (found[1] or found[2]) if found else None)
    return None


def cancel_recorded_jobs(record: Path) -> None:
    """End the jobs in `record` that still wait or run; raise SlurmError if Slurm does not answer."""
    try:
        ids = record.read_text().split()
    except FileNotFoundError:
        return
    left = query_live_jobs(ids)
    if left is None:
        raise SlurmError(f"squeue did not report which jobs of {record} are left: scancel {' '.join(ids)}")
    cancel_jobs(left)
