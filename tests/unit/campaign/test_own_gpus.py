"""The GPUs of this machine, as fake programs of their vendors list them."""

from pathlib import Path

import pytest

from hpcrl.campaign.own_gpus import add_own_gpus, describe_own_gpus, list_own_gpus
from hpcrl.campaign.request import load_request
from hpcrl.config.site import DEVICE_VARIABLES
from hpcrl.errors import PlanError
from hpcrl.plan.plan import Plan
from tests.support.plans import make_site

H100 = "NVIDIA H100 80GB HBM3, 81559"
MI300X = "card{},GPU,AMD Instinct MI300X,206141652992,0"
MI300X_HEADER = "device,Device Type,Card Series,VRAM Total Memory (B),VRAM Total Used Memory (B)"


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH for the programs of GPU vendors, which hides those of this machine."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("nvidia-smi", "rocm-smi"):
        write_program(tmp_path / name, "exit 9")
    return tmp_path


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def has_gpus(programs: Path, name: str, *lines: str) -> None:
    text = "\n".join(lines)
    write_program(programs / name, f"cat <<'END'\n{text}\nEND")


def plan(*settings: str) -> Plan:
    return load_request("quickstart", site="local", settings=settings).plan


def describe_gpus(made: Plan) -> dict[str, tuple[int, int]]:
    """Return the first GPU of each role, and its number."""
    return {role.role: (role.first_gpu, role.num_workers * role.gpus_per_worker) for role in made.roles}


def test_a_machine_without_gpus_is_planned_without_any() -> None:
    assert describe_gpus(plan()) == dict.fromkeys(("env", "decode", "train", "reward"), (0, 0))
    assert plan().components[0].gpu is None


def test_trainer_and_engines_get_gpus_of_their_machine_each(programs: Path) -> None:
    has_gpus(programs, "nvidia-smi", *[H100] * 4)
    made = plan("resources.train.num_workers=2", "resources.decode.num_workers=2")
    assert describe_gpus(made) == {"env": (0, 0), "train": (0, 2), "decode": (2, 2), "reward": (0, 0)}
    assert (made.components[0].gpu, made.components[0].gpus_per_node) == ("h100", 4)


def test_amd_gpus_are_found_with_the_variable_that_chooses_among_them(programs: Path) -> None:
    has_gpus(programs, "rocm-smi", "", MI300X_HEADER, *(MI300X.format(number) for number in range(2)))
    host = add_own_gpus(make_site("local")).partitions["host"]
    assert (host.gpu, host.gpus_per_node, host.gpu_variable) == ("mi300x", 2, "ROCR_VISIBLE_DEVICES")


@pytest.mark.parametrize(("given", "num"), [("0,2", 2), ("", 0), ("-1", 0), ("3", 1), ("GPU-a,GPU-b,GPU-c", 3)])
def test_a_variable_hides_gpus(programs: Path, monkeypatch: pytest.MonkeyPatch, given: str, num: int) -> None:
    has_gpus(programs, "nvidia-smi", *[H100] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert len(list_own_gpus()[1]) == num


def test_the_memory_of_a_gpu_that_the_catalogue_lacks_is_known(programs: Path) -> None:
    has_gpus(programs, "nvidia-smi", "NVIDIA GeForce RTX 9090, 32768")
    site = add_own_gpus(make_site("local"))
    gpu = site.find_gpu(site.partitions["host"].gpu)
    assert gpu is not None
    assert (gpu.name, gpu.memory_gib, gpu.has_speed) == ("nvidia-geforce-rtx-9090", 32.0, False)


@pytest.mark.parametrize("script", ["exit 1", "echo No devices were found", "printf '\\377\\376'", "echo a,b; echo ,,"])
def test_a_program_that_fails_or_prints_nonsense_finds_none(programs: Path, script: str) -> None:
    for name in ("nvidia-smi", "rocm-smi"):
        write_program(programs / name, script)
    assert list_own_gpus() == (None, [])


@pytest.mark.parametrize("backend", ["embedded", "vllm"])
def test_trainer_and_engine_use_one_gpu_in_turns(programs: Path, backend: str) -> None:
    has_gpus(programs, "nvidia-smi", H100)
    made = plan(f"engine.backend={backend}")
    assert describe_gpus(made) == {"env": (0, 0), "train": (0, 1), "decode": (0, 1), "reward": (0, 0)}
    assert made.has_gpu_shifts
    assert any("all roles need 2 GPUs, and site local has 1: the trainer" in line for line in made.fallbacks)


def test_two_engines_share_the_memory_of_one_gpu_but_not_servers_of_vllm(programs: Path) -> None:
    has_gpus(programs, "nvidia-smi", H100)
    two = "resources.prefill.num_workers=1"
    assert any("roles share them, and their memory" in line for line in plan(two).fallbacks)
    with pytest.raises(PlanError, match=r"all roles need 2 GPUs, if trainer and engines use theirs in turns"):
        plan("engine.backend=vllm", two)


def test_the_gpus_of_a_machine_are_described(programs: Path) -> None:
    assert describe_own_gpus(make_site("local")) == []
    has_gpus(programs, "nvidia-smi", *[H100] * 4)
    assert describe_own_gpus(make_site("local")) == ["this machine has 4 GPUs (h100), of CUDA_VISIBLE_DEVICES"]


def test_sites_with_a_scheduler_or_with_gpus_in_their_file_are_left_alone(programs: Path) -> None:
    has_gpus(programs, "nvidia-smi", *[H100] * 4)
    assert add_own_gpus(make_site("lab")) == make_site("lab")
    named = make_site("local", "partitions.host.gpu=l4", "partitions.host.gpus_per_node=1")
    assert add_own_gpus(named) == named
