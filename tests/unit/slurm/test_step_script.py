"""What steps on the nodes of a partition start with: prologue, variables, directories, image."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import ContainerTool, Site, load_site
from hpcrl.errors import ConfigError, PlanError
from hpcrl.plan.plan import Plan
from hpcrl.slurm.step_script import StepSetup, make_step_script, read_step_setup, write_step_setups
from tests.support.plans import make_site, plan_recipe
from tests.support.programs import needs_bubblewrap
from tests.support.shell_scripts import find_script_problems

BASH = shutil.which("bash") or "bash"


def change(partition: str = "train", *, of_site: dict[str, Any] | None = None, **changes: Any) -> Site:
    """Return the lab with one changed partition."""
    site = make_site("lab")
    changed = msgspec.structs.replace(site.partitions[partition], **changes)
    return msgspec.structs.replace(site, partitions=site.partitions | {partition: changed}, **(of_site or {}))


def run_script(text: str | None, tmp_path: Path, *command: str, **environ: str) -> str:
    """Run the script of a partition with a command, and return its output."""
    assert text is not None
    path = tmp_path / "step.sh"
    path.write_text(text)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home")} | environ
    done = subprocess.run([BASH, str(path), *command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_script(site: Site, *, driver_prologue: str | None = None, binds: tuple[str, ...] = ()) -> str | None:
    return make_step_script(site, "train", driver_prologue=driver_prologue, binds=binds)


def test_a_partition_that_needs_nothing_has_no_script() -> None:
    assert make_script(make_site("lab")) is None


def test_variables_of_a_partition_come_before_those_of_the_site_and_are_expanded_on_the_node(tmp_path: Path) -> None:
    site = change(environment={"A": "own", "B": '$JOB/it\'s "x" `y` $5'}, of_site={"environment": {"A": "site"}})
    printed = run_script(make_script(site), tmp_path, "printenv", "A", "B", JOB="12")
    assert printed == 'own\n12/it\'s "x" `y` $5\n'


def test_temporary_files_and_what_compilers_keep_go_to_directories_of_the_node(tmp_path: Path) -> None:
    site = change(temporary_dir="$SCRATCH/t m p", of_site={"cache_dir": "~/cache"})
    printed = run_script(make_script(site), tmp_path, "printenv", "TMPDIR", "TRITON_CACHE_DIR", SCRATCH=str(tmp_path))
    assert printed == f"{tmp_path}/t m p\n{tmp_path}/home/cache/triton\n"
    assert (tmp_path / "t m p").is_dir()
    own = run_script(make_script(change(temporary_dir="/tmp")), tmp_path, "printenv", "VLLM_CACHE_ROOT")
    assert own == "/tmp/cache/vllm\n"


def test_an_own_prologue_may_fail_and_use_unset_variables_and_arguments(tmp_path: Path) -> None:
    prologue = tmp_path / "modules.sh"
    prologue.write_text('set -- lost\necho "$UNSET_VARIABLE"\nfalse\nexport FOUND=yes\n')
    text = make_script(change(prologue=str(prologue)))
    assert run_script(text, tmp_path, "printenv", "FOUND") == "\nyes\n"
    assert make_script(change(prologue=str(prologue)), driver_prologue=str(prologue)) is None
    with pytest.raises(PlanError, match=r"prologue 'absent.sh' cannot be read"):
        make_script(change(prologue="absent.sh"))


@pytest.mark.parametrize(
    ("tool", "gpu", "expected"),
    [
        ("apptainer", "h100", "apptainer exec --flag --nv --bind=/c --bind=/data /images/x.sif"),
        ("singularity", "mi300a", "singularity exec --flag --rocm --bind=/c --bind=/data /images/x.sif"),
        ("apptainer", "AMD-MI300A", "apptainer exec --flag --rocm --bind=/c --bind=/data /images/x.sif"),
        ("apptainer", None, "apptainer exec --flag --bind=/c --bind=/data /images/x.sif"),
        ("enroot", "h100", "enroot start --flag --mount=/c:/c --mount=/data:/data /images/x.sif"),
        ("shifter", "h100", "shifter --flag --image=/images/x.sif --volume=/c:/c --volume=/data:/data"),
    ],
)
def test_one_word_runs_steps_in_an_image(tool: ContainerTool, gpu: str | None, expected: str) -> None:
    settings = {"container": tool, "image": "/images/x.sif", "image_flags": ["--flag"]}
    site = change(gpu=gpu, of_site=settings)
    text = make_script(site, binds=("/c", "/data"))
    assert text is not None
    assert text.splitlines()[-1] == f'exec {expected} "${{hpcrl_step[@]}}"'


@pytest.fixture
def node_dir() -> Iterator[Path]:
    """A directory of the node outside of /tmp, which images have anyway."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-test-", dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root file system of links into /usr."""
    root = tmp_path / "image"
    root.mkdir()
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    return root


@needs_bubblewrap
def test_a_step_in_an_image_writes_to_the_directories_of_the_node(node_dir: Path, image: Path, tmp_path: Path) -> None:
    directories = {"temporary_dir": "$NODE_DIR/t m p", "cache_dir": "$NODE_DIR/cache"}
    site = change(**directories, of_site={"container": "bubblewrap", "image": str(image)})
    command = 'mkdir "$VLLM_CACHE_ROOT"; touch "$TMPDIR/a" "$VLLM_CACHE_ROOT/b"'
    run_script(make_script(site, binds=("/usr",)), tmp_path, "bash", "-c", command, NODE_DIR=str(node_dir))
    assert (node_dir / "t m p" / "a").exists()
    assert (node_dir / "cache" / "vllm" / "b").exists()


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("apptainer", 'apptainer exec --nv --bind="$TMPDIR" --bind="$WORK/c" --bind=/data /x.sif'),
        ("podman-hpc", '--volume="$TMPDIR":"$TMPDIR" --volume="$WORK/c":"$WORK/c" --volume=/data:/data /x.sif'),
        ("enroot", 'enroot start --mount="$TMPDIR":"$TMPDIR" --mount="$WORK/c":"$WORK/c" --mount=/data:/data /x.sif'),
    ],
)
def test_the_directories_of_the_node_are_bound_into_images(tool: ContainerTool, expected: str) -> None:
    site = change(temporary_dir="/nvme/$USER", cache_dir="$WORK/c", of_site={"container": tool, "image": "/x.sif"})
    assert f'{expected} "${{hpcrl_step[@]}}"' in (make_script(site, binds=("/data",)) or "")


def test_a_directory_of_the_node_that_the_site_binds_too_is_bound_once() -> None:
    site = change(temporary_dir="/nvme", cache_dir="/nvme", of_site={"container": "apptainer", "image": "/x.sif"})
    assert (make_script(site, binds=("/nvme",)) or "").count("--bind") == 1
    assert (make_script(site) or "").count("--bind") == 1


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        ("pyxis", ["--container-image=/x", "--container-mounts=/c:/c"]),
        ("container-engine", ["--environment=/x"]),
    ],
)
def test_an_image_that_srun_runs_becomes_its_flags(tool: ContainerTool, flags: list[str], tmp_path: Path) -> None:
    campaign = CampaignDir(tmp_path)
    site = change(image="/x", of_site={"container": tool, "image_python": "/usr/bin/python3"})
    write_step_setups(campaign, plan_recipe(site="lab"), site)
    setup = read_step_setup(campaign, "train")
    assert setup.srun_flags[0] == flags[0].replace("/c", str(tmp_path))
    assert (setup.words, setup.python) == ([], "/usr/bin/python3")


def test_only_partitions_with_an_image_run_in_it(tmp_path: Path) -> None:
    site = change(image="", of_site={"container": "apptainer", "image": "/x.sif"})
    campaign = CampaignDir(tmp_path)
    write_step_setups(campaign, plan_recipe(site="lab"), site, paths=["/models"])
    assert read_step_setup(campaign, "train") == StepSetup()
    assert read_step_setup(campaign, "env").python == "python3"
    assert f"--bind={tmp_path} --bind=/models" in (campaign.steps / "env.sh").read_text()
    write_step_setups(campaign, plan_recipe(site="lab"), make_site("lab"))
    assert read_step_setup(campaign, "env") == StepSetup()


def test_an_image_without_a_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('extends = "local"\nname = "own"\nimage = "/x.sif"\n')
    with pytest.raises(ConfigError, match="set container to one of apptainer"):
        load_site(str(path))


def test_scripts_are_bash(tmp_path: Path) -> None:
    environment = {"PLAIN": "a b", "HARD": "$HOME/'\"`\\ $"}
    site = change(temporary_dir="$SCRATCH", environment=environment, image="/a b/$NAME.sif")
    text = make_script(site, binds=("/a 'b'",)) or ""
    assert find_script_problems({"step.sh": text}, tmp_path) == ""


def test_each_partition_may_name_an_interpreter(tmp_path: Path) -> None:
    write_step_setups(CampaignDir(tmp_path), plan_recipe(site="lab"), change(python="/arm/bin/python"))
    assert read_step_setup(CampaignDir(tmp_path), "train").python == "/arm/bin/python"
    assert read_step_setup(CampaignDir(tmp_path), "env").python is None


def plan_with(*settings: str) -> Plan:
    return plan_recipe(*settings, site="lab")


def test_flags_of_a_partition_reach_its_component() -> None:
    plan = plan_with(
        "site.partitions.train.threads_per_core=2",
        "site.partitions.train.cores_per_gpu=8",
        "site.partitions.train.mem_gib_per_gpu=9.5",
        'site.partitions.train.exclude=["train1"]',
        "site.partitions.train.reservation=course",
        'site.licenses=["scratch:1", "cfs"]',
    )
    train = plan.components[plan.role("train").component]
    wanted = {"--cpus-per-task=16", "--mem=10G", "--exclude=train1", "--reservation=course"}
    assert wanted <= set(train.slurm_flags)
    assert "--licenses=scratch:1,cfs" in plan.components[0].slurm_flags
    assert not [flag for part in plan.components[1:] for flag in part.slurm_flags if "licenses" in flag]


def test_a_small_job_has_a_shorter_walltime() -> None:
    limits = "site.partitions.train.walltime_limits=[{max_nodes=1, max_walltime_min=20}]"
    assert plan_with(limits, "job.walltime_min=20")
    with pytest.raises(PlanError, match=r"allows 20 to jobs of up to 1 nodes \(this one has 1 there\): lower it"):
        plan_with(limits, "job.walltime_min=30")


def test_a_qos_with_fewer_jobs_than_components_is_refused_or_warned_of(tmp_path: Path) -> None:
    one = "site.partitions.train.max_jobs=1"
    assert plan_with(one)
    assert any("allows 1 jobs of a user" in warning for warning in plan_with(one, "job.num_jobs=3").warnings)
    path = tmp_path / "small.toml"
    path.write_text(
        'name = "small"\nscheduler = "slurm"\npartitions.only = {slurm_partition = "only", cores_per_node = 64, '
        "mem_gib_per_node = 64, max_walltime_min = 1440, max_nodes = 9, max_jobs = 1}\n"
    )
    with pytest.raises(PlanError, match=r'partition \'only\'.*set job.layout = "hetstep"'):
        plan_recipe("job.layout=hetjob", site=str(path))
    assert plan_recipe("job.layout=hetstep", site=str(path))


def test_the_interface_of_a_partition_replaces_that_of_the_site() -> None:
    site = change(interface=["hsn*"])
    assert (site.list_interfaces("train"), site.list_interfaces("env")) == (["hsn*"], ["lo"])
