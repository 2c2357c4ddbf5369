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
choose_exports, select_exports, USUAL_EXPORTS  the variables of the shell that jobs get
expand_path            expand `~` and variables in a path of a site file
REQUIRED_COMMANDS      commands that a Slurm site must have
"""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
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
from hpcrl.slurm.script import make_mark, read_prologue
from hpcrl.system.files import find_variables, publish_file
from hpcrl.system.processes import is_alive, read_start_ticks

REQUIRED_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
USUAL_EXPORTS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "ENV", "BASH_ENV", "BASH_FUNC_*", "TERM", "TZ", "LANG", "LANGUAGE"),
    *("LC_*", "TMPDIR", "XDG_*", "SLURM_CONF", "HPCRL_*"),
    # directories, and names of the machine that modules read
    *("SCRATCH*", "PSCRATCH", "CINECA_SCRATCH", "WORK", "WORKDIR", "WORK2", "STORE", "STOREDIR", "FAST", "DATA", "CFS"),
    *("PROJECT", "PROJECT_*", "MEMBERWORK", "PROJWORK", "WORLDWORK", "STOCKYARD", "NERSC_*", "LUMI_*", "SYSTEMNAME"),
    *("CLUSTER_NAME", "BSC_*", "OLCF_*", "TACC_*"),
    # modules and what they set
    *("MODULE*", "__MODULES_*", "LOADEDMODULES", "_LMFILES_*", "LMOD_*", "__LMOD_*", "_ModuleTable*", "EBROOT*"),
    *("EBVERSION*", "EBU_*", "SPACK_*", "UENV_*", "CRAY*", "PE_*", "NVHPC_*", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("LIBRARY_PATH", "CPATH", "*_INCLUDE_PATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH", "CC", "CXX"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "MAMBA_*", "APPTAINER_*", "SINGULARITY_*", "ENROOT_*", "PODMANHPC_*"),
    # devices and networks
    *("CUDA_*", "NVIDIA_*", "ROCM_*", "ROCR_*", "HIP_*", "HSA_*", "AMD_*", "MIOPEN_*", "ZE_*", "ONEAPI_*", "SYCL_*"),
    *("GPU_DEVICE_ORDINAL", "NCCL_*", "NCCL_IB_PKEY", "RCCL_*", "GLOO_*", "NVSHMEM_*", "UCX_*", "UCX_IB_PKEY", "FI_*"),
    *("PSM2_*", "PSM3_*", "OMPI_*", "OPAL_PREFIX", "PRTE_*", "MPICH_*", "MV2_*", "PMI*", "I_MPI_*"),
    # libraries
    *("OMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "GOMP_*", "MALLOC_*", "TORCH*", "PYTORCH_*", "TRITON_*", "NVTE_*"),
    *("VLLM_*", "FLASHINFER_*", "HDF5_*", "HF_HOME", "HF_ENDPOINT", "HF_HUB_*", "HF_XET_*", "HF_DATASETS_*"),
    *("HF_MODULES_CACHE", "TRANSFORMERS_*", "TOKENIZERS_PARALLELISM"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SSL_CERT_*", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"),
)
"""The variables of the shell that all jobs get. None is a secret: a pattern passes no name that looks like one."""
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)


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


def submit_job(script: str, *, job: JobDir, site: Site, env: Mapping[str, str]) -> SubmittedJob:
    """Start a job of a campaign, with this environment, and record its id at once."""
    start = _submit_local if site.scheduler == "local" else _submit_slurm
    submitted = start(script, job, env)
    record_submission(submitted, job=job)
    return submitted


def record_submission(submitted: SubmittedJob, *, job: JobDir) -> None:
    """Store the record; from now on this job may be cancelled."""
    publish_file(job.submission, msgspec.json.format(msgspec.json.encode(submitted), indent=2) + b"\n")


def check_script(script: Path, *, site: Site) -> str:
    """Return Slurm's judgement of the script, without queueing it."""
    done = run_slurm(["sbatch", "--test-only", str(script)], env=os.environ | make_site_environment(site))
    check_answer("sbatch", done.returncode, done.stderr or done.stdout)
    return (done.stdout + done.stderr).strip()


def interrupt_job(submitted: SubmittedJob, *, site: Site) -> None:
    """Ask a running job to end now and clean up; a job that scancel kills cannot clean up."""
    if submitted.scheduler == "slurm":
        ask_slurm(["scancel", "--batch", "--signal=INT", submitted.id], env=os.environ | make_site_environment(site))
    else:
        _send_signal(submitted, signal.SIGINT)


def cancel_job(submitted: SubmittedJob, *, site: Site) -> None:
    """End a job; it is not an error if the job has already ended."""
    if submitted.scheduler == "slurm":
        cancel_jobs([submitted.id], env=os.environ | make_site_environment(site))
    else:
        _send_signal(submitted, signal.SIGTERM)


def _send_signal(submitted: SubmittedJob, sig: signal.Signals) -> None:
    if is_alive(submitted.pid, submitted.start_ticks):
        assert submitted.pid is not None
        os.kill(submitted.pid, sig)


def _submit_local(script: str, job: JobDir, env: Mapping[str, str]) -> SubmittedJob:
    """Run the script with bash in a separate session; `exec` makes its pid the driver's."""
    publish_file(job.script, script, mode=0o700)
    with job.log("batch").open("ab") as log:
        process = subprocess.Popen(
            ["bash", str(job.script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=env,
        )
    pid = process.pid
    ticks = read_start_ticks(pid)
    process.returncode = 0  # it outlives this command on purpose: this silences the warning of Popen's destructor
    return SubmittedJob(id=f"local-{pid}", scheduler="local", time=time.time(), pid=pid, start_ticks=ticks)


def _submit_slurm(script: str, job: JobDir, env: Mapping[str, str]) -> SubmittedJob:
    import submitit  # noqa: TID251

    class HetExecutor(submitit.SlurmExecutor):
        """The submission and job folder of submitit, with our batch script in place of a pickled function."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            del uid
            return command

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            waits = [f"--dependency={start}" for start in list_start_dependencies(job)]
            return limited_command(["sbatch", *waits, str(submission_file_path)], env=env)

    executor = HetExecutor(folder=job.root)
    mark = make_mark(job)
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


def make_job_environment(site: Site, *, variables: Iterable[str]) -> dict[str, str]:
    """Return the environment of a submission, which is that of its jobs; `variables` are those of the recipe."""
    return {**choose_exports(site, variables=variables), **make_site_environment(site)}


def choose_exports(site: Site, *, variables: Iterable[str]) -> dict[str, str]:
    """Return the variables of this shell that the jobs get."""
    prologues = dict.fromkeys(map(site.choose_prologue, site.partitions))
    of_prologues = [name for prologue in prologues if prologue for name in find_variables(read_prologue(prologue))]
    named = [*variables, *site.variables, *of_prologues]
    return select_exports(os.environ, named=named, allowed=site.exports or ())


def select_exports(environ: Mapping[str, str], *, named: Iterable[str], allowed: Iterable[str]) -> dict[str, str]:
    """Return the variables that jobs may have: USUAL_EXPORTS, what recipe and site name, and what the site allows.

    All of them may be patterns; only one that is allowed passes a name that looks like a secret.
    """
    known, allowed = frozenset([*USUAL_EXPORTS, *named]), frozenset(allowed)

    def may_pass(name: str) -> bool:
        patterns = allowed if _SECRET_NAME.search(name) else allowed | known
        return name in known or any(fnmatchcase(name, one) for one in patterns)

    return {name: value for name, value in environ.items() if may_pass(name)}
