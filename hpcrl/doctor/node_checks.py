"""The checks of a node: `python -m hpcrl.doctor.node_checks REQUEST`, a JSON file, stores the results beside it.

Then it meets the other nodes, until its job is cancelled (hpcrl.doctor.node_meeting). With a second argument it runs on
the second node of the partition, which makes the file that the first waits for, and meets the others.

NodeRequest      the site, the partition, and what the step asked Slurm for
run_node_checks  all of them
run_machine_checks  those of a machine without a scheduler
check_*          one check each
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from hpcrl.campaign.own_gpus import list_own_gpus
from hpcrl.config.site import DEVICE_VARIABLES, DeviceVariable, Site
from hpcrl.doctor.file_checks import check_hdf5, check_lag, check_rates, make_signal
from hpcrl.doctor.login_checks import check_proxy
from hpcrl.doctor.node_meeting import MeetingFiles, NodeMeeting
from hpcrl.doctor.result import INTERNET_REACHED, CheckResult, fail_check, leave_unknown, pass_check, warn_check
from hpcrl.errors import ConfigError, SlurmError
from hpcrl.slurm.commands import run_slurm
from hpcrl.system.files import publish_file, remove_path
from hpcrl.system.memory import count_oom_kills, read_memory_limit
from hpcrl.system.network import find_bind_address, find_faster_interface, find_interface, is_reachable
from hpcrl.system.package_range import VLLM, find_installed

MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY_GIB = 1.0
INTERNET_HOST = ("huggingface.co", 443)
PROGRAM_TIMEOUT_S = 30.0
DRIVER_PROGRAMS = ("nvidia-smi", "rocm-smi", "amd-smi")
MPI_PROBE = "from mpi4py import MPI; print('world', MPI.COMM_WORLD.Get_size(), flush=True)"
MPI_TIMEOUT_S = 60.0
ENGINE_PROBE = "hpcrl.trial.engine_probe"
ENGINE_TIMEOUT_S = 600.0
MAX_MEAN_DIFFERENCE = 0.1
"""The most by which log-probs may differ on average, in nats: bfloat16 has 0.02 here, wrong positions 1.5."""
ASKED_SHARE = 0.95
"""The least share of the memory asked for: sites keep some back."""
_GIB = 2**30


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The checks that a node is asked for."""

    site: Site
    partition: str
    cpus: int
    """The CPUs that Slurm was asked for."""
    mem_gib: int | None
    """The memory that it was asked for; None if the site's jobs ask for none."""
    has_engine: bool
    """True if this node starts a vLLM server."""


def run_node_checks(request: NodeRequest, files: MeetingFiles) -> Iterator[CheckResult]:
    """Yield the results; the batch script of `files` is judged by Slurm, and its signal appears meanwhile."""
    site, label = request.site, request.partition
    part = site.partitions[label]
    yield check_interface(site.list_interfaces(label))
    yield from check_proxy(site)
    yield check_cores(len(os.sched_getaffinity(0)), request.cpus)
    yield check_memory(read_memory_limit(), request.mem_gib, counts_kills=count_oom_kills() is not None)
    yield check_shared_memory(Path("/dev/shm"))
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_namespaces()
    yield check_temporary_files(os.environ.get("TMPDIR", tempfile.gettempdir()))
    if part.gpus_per_node:
        yield check_devices(os.environ, part.gpu_variable, 1)
        yield check_gpu_driver()
    yield check_internet(site, is_reachable(*INTERNET_HOST))
    yield check_submission(site, files.script, in_image=site.choose_image(label) is not None)
    yield check_mpi(site)
    yield check_hdf5(files.folder)
    yield from check_rates(files.folder)
    yield check_lag(files.signal)
    if request.has_engine:
        yield check_engine(files.folder / f"{label}-engine")


def run_machine_checks(site: Site, *, folder: Path, has_engine: bool) -> Iterator[CheckResult]:
    """Yield the results of this machine, for a site without a scheduler; the engine's files are below `folder`."""
    part = next(iter(site.partitions.values()))
    yield pass_check("cores", f"{len(os.sched_getaffinity(0))} CPUs, {part.cores_per_node} in the site file")
    yield check_own_gpus(len(list_own_gpus()[1]), part.gpus_per_node)
    yield check_shared_memory(Path("/dev/shm"))
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_namespaces()
    yield check_temporary_files(os.environ.get("TMPDIR", tempfile.gettempdir()))
    if has_engine:
        yield check_hdf5(folder)
        yield check_engine(folder / "engine")


def check_own_gpus(seen: int, stated: int) -> CheckResult:
    """Check that this machine has the GPUs of its site file, if that names any."""
    if seen < stated:
        change = f"set gpus_per_node = {seen} in its partition, or look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return fail_check("gpus", f"{seen} GPUs, and the site file has {stated}", change)
    return pass_check("gpus", f"{seen} GPUs")


def check_interface(wanted: list[str]) -> CheckResult:
    """Check that the node has the interface that roles bind to."""
    try:
        name, address = find_interface(wanted)
    except (ConfigError, OSError) as error:
        return fail_check("interface", str(error), "correct network.interface, or the interface of this partition")
    faster = find_faster_interface(name)
    if faster is not None and not wanted:
        change = f"if nodes reach each other by it, set network.interface = {faster!r}"
        return warn_check("interface", f"{name} {address}, and {faster} is faster", change)
    return pass_check("interface", f"{name or 'of the host name'} {address}")


def check_cores(seen: int, asked: int) -> CheckResult:
    """Check that a step may run on the CPUs that it asked for."""
    if seen < asked:
        change = "if Slurm counts hardware threads, set threads_per_core = 2 in the partition"
        return fail_check("cores", f"{seen} of {asked} CPUs", change)
    return pass_check("cores", f"{seen} CPUs, {asked} asked for")


def check_memory(limit_bytes: int | None, asked_gib: int | None, *, counts_kills: bool) -> CheckResult:
    """Check the memory that the step may use."""
    if limit_bytes is None:
        return pass_check("memory", "no limit by a control group: one job may take the memory of another")
    limit_gib = limit_bytes / _GIB
    if asked_gib is not None and limit_gib < ASKED_SHARE * asked_gib:
        change = "ask the site how memory is requested there; mem_flag = false leaves `--mem` out"
        return fail_check("memory", f"{limit_gib:.3g} of {asked_gib} GiB", change)
    found = f"{limit_gib:.3g} GiB" + (f", {asked_gib} asked for" if asked_gib is not None else "")
    if not counts_kills:
        found += "; the kernel does not show what it ends for a lack of it"
    return pass_check("memory", found)


def check_shared_memory(folder: Path) -> CheckResult:
    """Check the space for weights that engines of a node share."""
    if not os.access(folder, os.W_OK):
        return fail_check(
            "shared-memory", f"{folder} cannot be written", "set mpi.couriers = false: weights go by files"
        )
    size_gib = shutil.disk_usage(folder).total / _GIB
    if size_gib < MIN_SHARED_MEMORY_GIB:
        change = "set mpi.couriers = false, or ask the site for a larger /dev/shm: it has two versions of the weights"
        return warn_check("shared-memory", f"{size_gib:.3g} GiB", change)
    return pass_check("shared-memory", f"{size_gib:.3g} GiB")


def check_open_files(soft: int, hard: int) -> CheckResult:
    """Check the limit of open files."""
    most = hard if hard != resource.RLIM_INFINITY else soft
    if 0 < most < MIN_OPEN_FILES:
        change = "ask the site for a higher limit, or lower rollout.max_running: each episode may have several files"
        return warn_check("open-files", f"at most {most}", change)
    return pass_check("open-files", f"{soft}, at most {hard}")


def check_namespaces() -> CheckResult:
    """Check that environments can have a sandbox."""
    if shutil.which("bwrap") is None:
        found = next((name for name in ("apptainer", "singularity") if shutil.which(name)), None)
        if found is None:
            change = 'install bubblewrap, or allow code without a sandbox by isolation = "none"'
            return warn_check("sandbox", "neither bwrap nor apptainer is installed", change)
        return pass_check("sandbox", f"{found}, with an image")
    done = _run("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--", "true")
    if done is None or done.returncode:
        why = "it does not end" if done is None else done.stderr.strip()[-200:]
        return warn_check("sandbox", f"bwrap is refused: {why}", 'use apptainer with an image: sandbox = "apptainer"')
    return pass_check("sandbox", "bwrap")


def check_temporary_files(folder: str) -> CheckResult:
    """Check the directory of temporary files."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError as error:
        return fail_check("temporary-files", f"{folder}: {error.strerror}", "set temporary_dir in the site file")
    return pass_check("temporary-files", folder)


def check_devices(environ: Mapping[str, str], variable: DeviceVariable | None, asked: int) -> CheckResult:
    """Check that a variable names the GPUs of the step."""
    found = {name: value for name in DEVICE_VARIABLES if (value := environ.get(name))}
    if not found:
        change = "set gpu_variable in the partition; without it each worker takes devices by its number on the node"
        return warn_check("gpu-variable", "Slurm sets none", change)
    first = next(iter(found))
    if variable is not None and variable not in found:
        return fail_check("gpu-variable", f"Slurm sets {', '.join(found)}", f"set gpu_variable = {first!r}")
    num = len(found[first if variable is None else variable].split(","))
    if num != asked:
        return fail_check(
            "gpu-variable", f"{num} devices where {asked} was asked for: {found}", "see Slurm's gres.conf"
        )
    return pass_check("gpu-variable", ", ".join(f"{name}={value}" for name, value in found.items()))


def check_gpu_driver() -> CheckResult:
    """Check that the driver of the GPUs answers."""
    program = next((name for name in DRIVER_PROGRAMS if shutil.which(name)), None)
    if program is None:
        return leave_unknown("gpu-driver", f"none of {', '.join(DRIVER_PROGRAMS)} is on PATH")
    done = _run(program)
    if done is None or done.returncode:
        return fail_check(
            "gpu-driver", f"{program} fails", "exclude the node (`exclude` in the partition) and report it"
        )
    return pass_check("gpu-driver", program)


def check_internet(site: Site, is_open: bool) -> CheckResult:
    """Compare the way to the internet with what the site file states."""
    stated = site.network.internet_on_compute
    if stated == "yes" and not is_open:
        change = 'set network.internet_on_compute = "no", and environment.HF_HUB_OFFLINE = "1"'
        return fail_check("internet", f"{INTERNET_HOST[0]} is not reached", change)
    if stated == "no" and is_open:
        return warn_check("internet", "there is a way out", 'set network.internet_on_compute = "yes"')
    return pass_check("internet", INTERNET_REACHED if is_open else "not reached")


def check_submission(site: Site, script: Path, *, in_image: bool = False) -> CheckResult:
    """Check that Slurm accepts a job from the node, without queueing one."""
    if in_image and shutil.which("sbatch") is None:
        return leave_unknown("submission", "sbatch is not in the image; the driver runs outside it")
    try:
        done = run_slurm(["sbatch", "--test-only", str(script)], timeout_s=PROGRAM_TIMEOUT_S)
        works, why = done.returncode == 0, (done.stderr or done.stdout).strip()[-200:]
    except SlurmError as error:
        works, why = False, str(error)
    if works or not site.nodes_may_submit:
        found = "accepted" if works else "refused, as the site file has it"
        return pass_check("submission", f"sbatch from the node: {found}")
    return fail_check("submission", f"sbatch from the node: {why}", "set nodes_may_submit = false")


def check_mpi(site: Site) -> CheckResult:
    """Check that `srun` and the MPI of this interpreter make one world of two processes, as couriers need."""
    flavour, how = site.mpi.flavour, f"srun --mpi={site.mpi.srun_type}"
    if flavour == "none" or not site.mpi.couriers:
        return pass_check("mpi", "not used: weights go by TCP or files")
    if shutil.which("srun") is None:
        return leave_unknown("mpi", "srun is not on PATH here, as in most images")
    num_nodes = min(int(os.environ.get("SLURM_JOB_NUM_NODES", "1")), 2)
    command = ["srun", f"--jobid={os.environ.get('SLURM_JOB_ID', '')}", "--overlap", f"--nodes={num_nodes}"]
    command += [
        "--ntasks=2",
        "--cpus-per-task=1",
        "--gres=none",
        f"--mpi={site.mpi.srun_type}",
        sys.executable,
        "-c",
        MPI_PROBE,
    ]
    done = run_slurm(command, timeout_s=MPI_TIMEOUT_S)
    sizes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("world ")]
    if sizes == ["2", "2"]:
        return pass_check("mpi", f"{how}: a world of 2 on {num_nodes} node{'s' * (num_nodes > 1)}")
    if "No module named 'mpi4py'" in done.stderr:
        return warn_check("mpi", "mpi4py is not installed", f"{sys.executable} -m pip install 'hpcrl[mpi]'")
    found = f"{how} makes worlds of {' and '.join(sizes)}" if sizes else f"{how}: {_read_last(done.stderr)}"
    change = 'correct mpi.srun_type (`srun --mpi=list`), or set mpi.flavour = "none": weights go by TCP'
    return fail_check("mpi", found, change)


def check_engine(folder: Path) -> CheckResult:
    """Check that a vLLM server starts, and that its log-probs are those of a trainer on the same device."""
    change = f"{sys.executable} -m pip install 'hpcrl[{VLLM.extra}]', or use engine.backend = \"embedded\""
    if find_installed(VLLM) is None:
        return warn_check("engine", "vLLM is not installed", change)
    command = [sys.executable, "-m", ENGINE_PROBE, str(folder)]
    with tempfile.TemporaryDirectory(prefix="hpcrl-", ignore_cleanup_errors=True) as temporary:  # vLLM leaves files
        env = os.environ | {"TMPDIR": temporary}
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            where = "set cache_dir and a python on a fast file system"
            return fail_check("engine", f"no vLLM server answered within {ENGINE_TIMEOUT_S:g} s", where)
    if done.returncode:
        return fail_check("engine", _read_last(done.stderr), f"see its log; {change}")
    agreement = json.loads(done.stdout)
    remove_path(folder)
    mean, started = agreement["mean_difference"], f"vLLM {agreement['version']} started in {agreement['start_s']:.0f} s"
    if not mean <= MAX_MEAN_DIFFERENCE:  # also a number that is none
        found = f"log-probs differ from the trainer's by {mean:.3g} on average, over {agreement['num_tokens']} tokens"
        return fail_check("engine", found, "install another version of vLLM or torch there: training would diverge")
    return pass_check("engine", f"{started}; its log-probs differ from the trainer's by {mean:.2g}")


def _read_last(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1][-200:]


def _run(*command: str) -> "subprocess.CompletedProcess[str] | None":
    """Run a program; None if it is missing or does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def main(path: Path, *, is_second: bool) -> None:
    """Run the checks of a request, store the results beside it, and meet the other nodes."""
    request = msgspec.json.decode(path.read_bytes(), type=NodeRequest)
    files = MeetingFiles(path.parent, request.partition)
    meeting = NodeMeeting(files.second if is_second else files)
    with contextlib.suppress(ConfigError, OSError):  # without an interface it only waits for SIGTERM
        meeting.open(find_bind_address(request.site.list_interfaces(request.partition)))
    if is_second:
        make_signal(files.signal)
    else:
        publish_file(files.results, msgspec.json.encode(list(run_node_checks(request, files))))
    meeting.attend()


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_second=len(sys.argv) > 2)
