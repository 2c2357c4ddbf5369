"""Submit a batch script to Slurm (through submitit) or run it on this machine; end a job by its recorded id.

submit_job             start a job of a campaign and record its id
SubmittedJob           the record of a submitted job
record_submission      store that record
check_script           run `sbatch --test-only`
interrupt_job          ask a running job to end now and clean up
cancel_job             end a job
has_slurm, require_slurm  check that Slurm's commands are installed
make_site_environment  variables that Slurm's commands need to reach a site
make_job_environment   the environment of a submission
select_exports, USUAL_EXPORTS  the variables of the shell that jobs get
expand_path            expand `~` and variables in a path of a site file
REQUIRED_COMMANDS      commands that a Slurm site must have
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.site import SchedulerName, Site, default_lab_dir
from hpcrl.errors import SlurmError
from hpcrl.slurm.commands import (
    ask_slurm,
    await_marked_job,
    cancel_jobs,
    check_answer,
    find_marked_job,
    is_unanswered,
    limited_command,
    run_slurm,
)
from hpcrl.slurm.component_jobs import list_start_dependencies
from hpcrl.slurm.script import make_mark
from hpcrl.system.files import publish_file
from hpcrl.system.processes import is_alive, read_start_ticks

REQUIRED_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
USUAL_EXPORTS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LC_*", "TMPDIR", "SLURM_CONF", "HPCRL_*"),
    *("SCRATCH", "PSCRATCH", "WORK", "PROJECT", "MEMBERWORK", "CFS", "XDG_*", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_*"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "BASH_ENV", "BASH_FUNC_*", "MODULE*", "LOADEDMODULES", "_LMFILES_*"),
    *("LMOD_*", "__LMOD_*", "_ModuleTable*", "CRAY*", "PE_*", "ROCM_*", "HIP_*", "HSA_*", "CUDA_*", "NCCL_*", "RCCL_*"),
    *("UCX_*", "FI_*", "OMPI_*", "MPICH_*", "PMI*", "I_MPI_*", "OMP_*", "MKL_*", "TORCH_*", "PYTORCH_*", "TRITON_*"),
    *("VLLM_*", "HDF5_*", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_*", "TRANSFORMERS_*"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_*"),
)
"""The variables that jobs get from the shell where the site names `exports`: none of them is meant for a secret."""


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a submitted job; no other job may be cancelled."""

    id: str
    """Slurm's id of the job (of its leader), or `local-<pid>`."""
    scheduler: SchedulerName
    time: float
    pid: int | None = None
    start_ticks: int | None = None
    """Start time of the process: together with the pid it stays unique, even when the pid is reused."""


def make_site_environment(site: Site) -> dict[str, str]:
    """Return the variables that Slurm's commands need to reach this site."""
    if site.slurm_conf is None:
        return {}
    path = Path(expand_path(site.slurm_conf))
    if not path.is_file():
        is_lab = "$HPCRL_LAB" in site.slurm_conf
        fix = "`hpcrl lab up` makes one" if is_lab else f"correct slurm_conf in the site {site.name!r}"
        raise SlurmError(f"no Slurm at {path}: {fix}")
    return {"SLURM_CONF": str(path)}


def expand_path(text: str) -> str:
    """Expand `~` and $NAME in a path of a site file; $HPCRL_LAB has a default."""
    if "$HPCRL_LAB" in text:
        text = text.replace("$HPCRL_LAB", str(default_lab_dir()))
    expanded = os.path.expandvars(Path(text).expanduser())
    if "$" in expanded:
        raise SlurmError(f"{text!r} names a variable that is not set here: export it, or write the path out")
    return expanded


def has_slurm() -> bool:
    """Return whether this machine has Slurm's commands, as a login node has."""
    return all(map(shutil.which, REQUIRED_COMMANDS))


def require_slurm(site: Site) -> None:
    """Raise SlurmError, before anything is started, if one of Slurm's commands is missing."""
    missing = [command for command in REQUIRED_COMMANDS if shutil.which(command) is None]
    if missing:
        raise SlurmError(
            f"site {site.name!r} needs Slurm, and {', '.join(missing)} is not on PATH here: "
            "log in to a node that has Slurm's commands, or use --site local"
        )


def submit_job(script: str, *, job: JobDir, site: Site) -> SubmittedJob:
    """Start a job of a campaign and record its id at once."""
    submitted = (
        _submit_local(script, job=job, site=site) if site.scheduler == "local" else _submit_slurm(script, job, site)
    )
    record_submission(submitted, job=job)
    return submitted


def record_submission(submitted: SubmittedJob, *, job: JobDir) -> None:
    """Store the record; from now on this job may be cancelled."""
    publish_file(job.submission, msgspec.json.format(msgspec.json.encode(submitted), indent=2) + b"\n")


def check_script(script: Path, *, site: Site) -> str:
    """Return Slurm's judgement of the script, without queueing it."""
    done = run_slurm(["sbatch", "--test-only", str(script)], env=make_job_environment(site))
    check_answer("sbatch", done.returncode, done.stderr or done.stdout)
    return (done.stdout + done.stderr).strip()


def interrupt_job(submitted: SubmittedJob, *, site: Site) -> None:
    """Ask a running job to end now and clean up; a job that scancel kills cannot clean up."""
    if submitted.scheduler == "slurm":
        ask_slurm(["scancel", "--batch", "--signal=INT", submitted.id], env=make_job_environment(site))
    else:
        _send_signal(submitted, signal.SIGINT)


def cancel_job(submitted: SubmittedJob, *, site: Site) -> None:
    """End a job; it is not an error if the job has already ended."""
    if submitted.scheduler == "slurm":
        cancel_jobs([submitted.id], env=make_job_environment(site))
    else:
        _send_signal(submitted, signal.SIGTERM)


def _send_signal(submitted: SubmittedJob, sig: signal.Signals) -> None:
    if is_alive(submitted.pid, submitted.start_ticks):
        assert submitted.pid is not None
        os.kill(submitted.pid, sig)


def _submit_local(script: str, *, job: JobDir, site: Site) -> SubmittedJob:
    """Run the script with bash in a separate session; `exec` makes its pid the driver's."""
    publish_file(job.script, script, mode=0o700)
    with job.log("batch").open("ab") as log:
        process = subprocess.Popen(
            ["bash", str(job.script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=select_exports(os.environ, site.exports),
        )
    pid = process.pid
    ticks = read_start_ticks(pid)
    process.returncode = 0  # it outlives this command on purpose: this silences the warning of Popen's destructor
    return SubmittedJob(id=f"local-{pid}", scheduler="local", time=time.time(), pid=pid, start_ticks=ticks)


def _submit_slurm(script: str, job: JobDir, site: Site) -> SubmittedJob:
    import submitit  # noqa: TID251

    class HetExecutor(submitit.SlurmExecutor):
        """The submission and job folder of submitit, with our batch script in place of a pickled function."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            del uid
            return command

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            waits = [f"--dependency={start}" for start in list_start_dependencies(job)]
            return limited_command(["sbatch", *waits, str(submission_file_path)], env=make_job_environment(site))

    executor = HetExecutor(folder=job.root)
    mark, env = make_mark(job), make_job_environment(site)
    if job.number and (known := find_marked_job(mark, env=env)) is not None:
        cancel_jobs([known], env=env)  # of an earlier try, whose plan may have changed since
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it then raises
            submitted = executor._submit_command(script)
    except submitit.core.utils.FailedJobError as error:
        code = getattr(error.__cause__, "returncode", 1)
        if is_unanswered(code, str(error)):
            id = await_marked_job(mark, code=code, answer=str(error), env=env)
            return SubmittedJob(id=id, scheduler="slurm", time=time.time())
        check_answer("sbatch", code, str(error))
        raise
    except submitit.core.utils.FailedSubmissionError as error:
        raise SlurmError(f"sbatch printed an unexpected answer: {error}") from error
    return SubmittedJob(id=submitted.job_id, scheduler="slurm", time=time.time())


def make_job_environment(site: Site) -> dict[str, str]:
    """Return the environment of a submission, which is that of its jobs."""
    return {**select_exports(os.environ, site.exports), **make_site_environment(site)}


def select_exports(environ: Mapping[str, str], allowed: Sequence[str] | None) -> dict[str, str]:
    """Return the variables that jobs may have: all, or those of the system, modules and libraries, and `allowed`."""
    if allowed is None:
        return dict(environ)
    patterns = (*USUAL_EXPORTS, *allowed)
    return {name: value for name, value in environ.items() if any(fnmatchcase(name, one) for one in patterns)}
