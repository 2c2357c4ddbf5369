"""Workers with GPUs use the cores near them: directories as the kernel makes them, and the cores of this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.system.near_cores import bind_near_gpus, list_near_cores

NVIDIA = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 251
GPU UUID: \t GPU-{uuid}
Bus Type: \t PCIe
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Excluded:\t No
"""
AMD = "cpu_cores_count 0\nsimd_count 440\nlocation_id {location}\ndomain 0\nunique_id {unique}\n"


@pytest.fixture
def cores() -> Iterator[list[int]]:
    """The cores of this process, which are set back."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    yield sorted(allowed)
    os.sched_setaffinity(0, allowed)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_device(root: Path, address: str, *, near: str, node: int = 0) -> None:
    directory = root / "sys/bus/pci/devices" / address
    write(directory / "numa_node", f"{node}\n")
    write(directory / "local_cpulist", f"{near}\n")


def add_nvidia(root: Path, address: str, *, minor: int, near: str, node: int = 0, is_hidden: bool = False) -> None:
    text = NVIDIA.format(uuid=f"{minor:04d}", address=address, minor=minor)
    write(root / "proc/driver/nvidia/gpus" / address / "information", text)
    if not is_hidden:
        write(root / f"dev/nvidia{minor}", "")
    add_device(root, address, near=near, node=node)


def test_each_gpu_has_the_cores_of_its_socket_in_the_order_of_cuda(tmp_path: Path) -> None:
    add_nvidia(tmp_path, "0000:d8:00.0", minor=0, near="32-63,96-127", node=1)  # the driver numbers as it likes
    add_nvidia(tmp_path, "0000:3b:00.0", minor=1, near="0-31,64-95")
    found = list_near_cores(tmp_path)
    assert [uuid for uuid, _ in found] == ["GPU-0001", "GPU-0000"]
    assert found[0][1] == {*range(32), *range(64, 96)}
    assert found[1][1] == {*range(32, 64), *range(96, 128)}


def test_gpus_that_a_job_may_not_use_have_no_number(tmp_path: Path) -> None:
    add_nvidia(tmp_path, "0000:01:00.0", minor=0, near="0-3", is_hidden=True)
    add_nvidia(tmp_path, "0000:02:00.0", minor=1, near="4-7")
    assert list_near_cores(tmp_path) == [("GPU-0001", {4, 5, 6, 7})]


def test_gpus_of_amd_are_found_by_the_topology_of_the_kernel(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/gpu_id", "0\n")  # a socket
    write(nodes / "0/properties", "cpu_cores_count 64\n")
    for node, (bus, near) in {4: (0xC1, "48-63"), 12: (0xD9, "0-15")}.items():
        write(nodes / f"{node}/gpu_id", "51000\n")
        write(nodes / f"{node}/properties", AMD.format(location=bus << 8, unique=node))
        add_device(tmp_path, f"0000:{bus:02x}:00.0", near=near)
    assert list_near_cores(tmp_path) == [
        ("GPU-0000000000000004", set(range(48, 64))),
        ("GPU-000000000000000c", set(range(16))),
    ]


@pytest.mark.parametrize("name", ["1", "GPU-0001"])
def test_a_worker_uses_the_cores_near_its_gpu(tmp_path: Path, cores: list[int], name: str) -> None:
    first, second = cores[:2]
    add_nvidia(tmp_path, "0000:01:00.0", minor=0, near=f"{first}")
    add_nvidia(tmp_path, "0000:02:00.0", minor=1, near=f"{second}")
    assert bind_near_gpus([name], num_cpus=1, root=tmp_path) == {second} == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("gpus", "num_cpus"),
    [
        (["0"], 2),  # the only core near by is too little
        (["0", "2"], 1),  # both sockets
        (["1"], 1),  # a core for two GPUs
        (["MIG-0001"], 1),
        (["7"], 1),
        (["3"], 1),  # the kernel has no place for it
        ([], 1),
    ],
)
def test_cores_are_left_as_they_are_where_none_are_near_or_too_few(
    tmp_path: Path, cores: list[int], gpus: list[str], num_cpus: int
) -> None:
    first, second = cores[0], ",".join(map(str, cores[1:]))
    add_nvidia(tmp_path, "0000:01:00.0", minor=0, near=f"{first}")
    for minor in (1, 2):
        add_nvidia(tmp_path, f"0000:0{minor + 1}:00.0", minor=minor, near=f"{cores[1]}" if minor == 1 else second)
    add_nvidia(tmp_path, "0000:04:00.0", minor=3, near=f"{first}", node=-1)
    assert bind_near_gpus(gpus, num_cpus=num_cpus, root=tmp_path) == set()
    assert os.sched_getaffinity(0) == set(cores)


def test_a_machine_without_gpus_changes_nothing(tmp_path: Path, cores: list[int]) -> None:
    assert bind_near_gpus(["0"], num_cpus=1, root=tmp_path) == set()
    assert os.sched_getaffinity(0) == set(cores)
