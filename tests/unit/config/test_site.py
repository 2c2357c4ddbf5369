"""Unfamiliar sites, described in a few lines."""

import subprocess
from pathlib import Path

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission import preview_scripts
from hpcrl.config.site import load_site
from hpcrl.errors import ConfigError, PlanError
from hpcrl.hardware.gpus import GPU_CATALOGUE

SITE = """
name = "campus"
scheduler = "slurm"
partitions.cpu = {slurm_partition = "cpu", cores_per_node = 64, mem_gib_per_node = 256, max_walltime_min = 2880, max_nodes = 20}
partitions.gpu = {slurm_partition = "gpu", gpu = "GPU", gpus_per_node = 4, cores_per_node = 64, mem_gib_per_node = 512, max_walltime_min = 2880, max_nodes = 20}
"""  # noqa: E501 - a partition is a line


@pytest.fixture
def site(home: Path, tmp_path: Path) -> Path:
    return tmp_path / "campus.toml"


def test_a_gpu_that_is_described_nowhere_is_refused_with_the_words_that_describe_it(site: Path) -> None:
    site.write_text(SITE.replace("GPU", "gaudi3"))
    with pytest.raises(ConfigError, match=r"partitions.gpu.gpu = 'gaudi3'.*describe another one in \[gpus.gaudi3\]"):
        load_site(str(site))
    with pytest.raises(ConfigError, match=r"did you mean 'h20'\?"):
        load_site("lab", settings=("partitions.decode.gpu=h2O",))


def test_a_site_describes_its_own_gpu(site: Path) -> None:
    site.write_text(f"{SITE.replace('GPU', 'gaudi3')}gpus.gaudi3 = {{memory_gib = 128, bf16_tflops = 1835}}\n")
    found = load_site(str(site)).find_gpu("gaudi3")
    assert found is not None
    assert (found.name, found.memory_gib, found.has_speed) == ("gaudi3", 128, False)
    plan = load_request("quickstart", site=str(site)).plan
    assert plan.components[plan.role("decode").component].gpu == "gaudi3"


def test_figures_of_a_site_replace_those_of_the_catalogue(site: Path) -> None:
    site.write_text(f"{SITE.replace('GPU', 'h100')}gpus.h100 = {{memory_gib = 64}}\n")
    loaded = load_site(str(site))
    assert loaded.find_gpu("h100") != GPU_CATALOGUE["h100"]
    assert loaded.find_gpu("h200") == GPU_CATALOGUE["h200"]
    assert loaded.find_gpu(None) is None


@pytest.mark.parametrize("figures", ["{}", "{memory_gib = 0}", "{memory_gib = 8, tflops = 3}", '{memory_gib = "many"}'])
def test_odd_figures_are_refused(site: Path, figures: str) -> None:
    site.write_text(f"{SITE.replace('GPU', 'x1')}gpus.x1 = {figures}\n")
    with pytest.raises(ConfigError, match=r"gpus\.x1"):
        load_site(str(site))


@pytest.mark.parametrize("name", ["MY-VAR", "A.B", "9TO5"])
@pytest.mark.parametrize("table", ["environment", "partitions.cpu.environment"])
def test_a_wrong_name_of_a_variable_is_refused_with_its_table_and_that_name(site: Path, table: str, name: str) -> None:
    site.write_text(SITE.replace("GPU", "h100"))
    with pytest.raises(ConfigError) as caught:
        load_site(str(site), settings=(f"{table}={{GOOD = '1', '{name}' = '1'}}",))
    what = "expected the name of a variable, of letters, digits and '_'"
    assert str(caught.value).endswith(f": {table}: {what} (seen: {name!r})")


@pytest.mark.parametrize("gpu", sorted(GPU_CATALOGUE))
def test_a_site_with_any_gpu_of_the_catalogue_is_planned(site: Path, gpu: str) -> None:
    site.write_text(SITE.replace("GPU", gpu))
    request = load_request("quickstart", site=str(site), settings=("job.layout=hetjob",))
    [script] = preview_scripts(request, name="c")
    assert "#SBATCH --gres=gpu:" in script
    assert script.count("#SBATCH hetjob") == 2


def test_the_memory_of_a_gpu_decides_what_fits_though_its_speed_is_unknown(site: Path) -> None:
    site.write_text(f"{SITE.replace('GPU', 'small')}gpus.small = {{memory_gib = 0.001}}\n")
    with pytest.raises(PlanError, match=r"needs 40 GiB for 8\.0 billion weights in float32 and has 0 GiB"):
        load_request("quickstart", site=str(site), settings=("model.num_params=8_000_000_000",))


def test_flags_of_a_whole_job_are_on_its_first_component(site: Path) -> None:
    site.write_text(f"job_flags = ['--licenses=scratch']{SITE.replace('GPU', 'h100')}")
    [script] = preview_scripts(load_request("quickstart", site=str(site)), name="c")
    first, *others = script.split("#SBATCH hetjob")
    assert "#SBATCH --licenses=scratch\n" in first
    assert not any("licenses" in other for other in others)


PROLOGUE = 'echo "$SURELY_UNSET"; false; export LOADED=yes\n'


@pytest.mark.parametrize("place", ["own folder", "path"])
def test_the_users_own_prologue_may_use_unset_variables_and_fail(site: Path, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "config" / "hpcrl" / "jobs"
    folder.mkdir(parents=True)
    (folder / "mine.sh").write_text(PROLOGUE)
    named = "mine.sh" if place == "own folder" else folder / "mine.sh"
    site.write_text(f"prologue = '{named}'{SITE.replace('GPU', 'h100')}")
    [script] = preview_scripts(load_request("quickstart", site=str(site)), name="c")
    assert "set +eu\n" + PROLOGUE + "set -eu\n" in script
    body = script.partition("\nexec ")[0] + '\necho "$LOADED"\n'
    assert subprocess.run(["bash", "-c", body], capture_output=True, check=True).stdout == b"\nyes\n"


def test_a_prologue_that_is_missing_is_refused_with_the_folder_for_it(site: Path, tmp_path: Path) -> None:
    site.write_text(f"prologue = 'mine.sh'{SITE.replace('GPU', 'h100')}")
    request = load_request("quickstart", site=str(site))
    with pytest.raises(PlanError, match=rf"'mine.sh' cannot be read.*put it into {tmp_path}/config/hpcrl/jobs"):
        preview_scripts(request, name="c")


@pytest.mark.parametrize(
    ("gpu", "settings", "maker"),
    [
        ("h100", (), "nvidia"),
        ("mi300a", (), "amd"),
        ("AMD-MI300A", (), "amd"),
        ("instinct_250", (), "amd"),
        ("mini", (), "nvidia"),
        ("x1", ("partitions.gpu.gpu_variable=HIP_VISIBLE_DEVICES",), "amd"),
        ("x1", ("partitions.gpu.gpu_variable=ROCR_VISIBLE_DEVICES",), "amd"),
        ("x1", ("partitions.gpu.gpu_variable=CUDA_VISIBLE_DEVICES",), "nvidia"),
        ("mi300x", ("partitions.gpu.gpu_variable=CUDA_VISIBLE_DEVICES",), "amd"),
        ("x1", ("gpus.x1.maker=amd", "partitions.gpu.gpu_variable=CUDA_VISIBLE_DEVICES"), "amd"),
        ("mi300x", ("gpus.mi300x.maker=nvidia",), "nvidia"),
    ],
)
def test_the_maker_of_gpus_is_described_or_known_by_their_variable_or_name(
    site: Path, gpu: str, settings: tuple[str, ...], maker: str
) -> None:
    site.write_text(f"{SITE.replace('GPU', gpu)}gpus.{gpu} = {{memory_gib = 64}}\n")
    loaded = load_site(str(site), settings=settings)
    assert (loaded.find_gpu_maker("gpu"), loaded.find_gpu_maker("cpu")) == (maker, None)


def test_nodes_are_x86_64_but_beside_gpus_that_have_arm_cpus(site: Path) -> None:
    site.write_text(f"{SITE.replace('GPU', 'GB200')}gpus.GB200 = {{memory_gib = 186}}\n")
    loaded = load_site(str(site))
    assert (loaded.find_architecture("gpu"), loaded.find_architecture("cpu")) == ("aarch64", "x86_64")
    arm = load_site(str(site), settings=("partitions.cpu.architecture=aarch64",))
    assert arm.find_architecture("cpu") == "aarch64"
