"""The cores near a GPU: threads on another socket reach it, and its host memory, more slowly.

bind_near_gpus   let this process use only the cores near its GPUs, where these are enough
list_near_cores  the cores near each GPU that this process may use

Of NVIDIA's and AMD's GPUs the kernel has the PCI address, and of each address the cores; of others nothing is changed.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")


class _PciGpu(NamedTuple):
    uuid: str
    address: str
    """The address on the PCI bus: domain:bus:device.function."""


def bind_near_gpus(gpus: Sequence[str], *, num_cpus: int, root: Path = _ROOT) -> set[int]:
    """Let this process, and what it starts, use only the cores near its GPUs; return them, or none if any may be used.

    `gpus` are numbers or UUIDs, as in CUDA_VISIBLE_DEVICES. The cores are left as they are where those near by, divided
    among all GPUs that are near the same, are fewer than `num_cpus`: cores far away are better than too few.
    """
    by_number = list_near_cores(root)
    by_name = {str(number): cores for number, (_, cores) in enumerate(by_number)} | dict(by_number)
    own = [by_name.get(gpu, set()) for gpu in gpus]
    if not own or not all(own):
        return set()
    allowed = os.sched_getaffinity(0)
    near = allowed.intersection(set[int]().union(*own))
    num_sharing = sum(not near.isdisjoint(cores) for _, cores in by_number)
    if near in (set(), allowed) or len(near) * len(gpus) < num_cpus * num_sharing:
        return set()
    os.sched_setaffinity(0, near)
    return near


def list_near_cores(root: Path = _ROOT) -> list[tuple[str, set[int]]]:
    """Return the UUID of each GPU that this process may use, and the cores near it; none where that is not known."""
    gpus = [*_list_nvidia_gpus(root)] or [*_list_amd_gpus(root)]
    return [(gpu.uuid, _read_near_cores(root / "sys/bus/pci/devices" / gpu.address)) for gpu in gpus]


def _list_nvidia_gpus(root: Path) -> Iterator[_PciGpu]:
    """List the GPUs in the order of their addresses, which is CUDA's among equal ones, less those hidden from a job."""
    for directory in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        with contextlib.suppress(OSError):
            facts = dict(re.findall(r"^([\w ]+):\s*(\S+)", (directory / "information").read_text(), re.MULTILINE))
            device = root / f"dev/nvidia{facts.get('Device Minor', '')}"
            os.close(os.open(device, os.O_RDONLY))  # refused by the job's control group
            yield _PciGpu(facts.get("GPU UUID", ""), directory.name)


def _list_amd_gpus(root: Path) -> Iterator[_PciGpu]:
    """List the GPUs in the kernel's order, which is the runtime's, less those hidden from a job."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda node: int(node.name)):
        with contextlib.suppress(OSError, ValueError):  # refused by the job's control group
            if int((node / "gpu_id").read_text()):
                text = (node / "properties").read_text()
                facts = {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
                place = facts.get("location_id", 0)
                address = f"{facts.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
                yield _PciGpu(f"GPU-{facts.get('unique_id', 0):016x}", address)


def _read_near_cores(device: Path) -> set[int]:
    """Return the cores near a PCI device; none where the kernel has no place for it."""
    try:
        if int((device / "numa_node").read_text()) < 0:  # then its list has all cores
            return set()
        spans = re.findall(r"(\d+)(?:-(\d+))?", (device / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()
    return {core for first, last in spans for core in range(int(first), int(last or first) + 1)}
