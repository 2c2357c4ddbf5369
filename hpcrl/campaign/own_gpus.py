"""The GPUs of this machine, for a site without a scheduler.

add_own_gpus     the site with the GPUs that its machine has
describe_own_gpus  what is added to a site, for people
list_own_gpus    these, as their vendor's program lists them, less those that variables hide
OwnGpu           one of them
"""

import csv
import os
import re
import shutil
import subprocess
from typing import NamedTuple

from msgspec.structs import replace

from hpcrl.config.site import DEVICE_VARIABLES, DeviceVariable, GpuFigures, Site
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.slurm.site_detection import choose_gpu_name

QUERY_TIMEOUT_S = 20.0
NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
AMD_QUERY = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--csv")
HIDDEN = ("", "-1", "NoDevFiles")
"""Values of the variables where no device is to be used."""


class OwnGpu(NamedTuple):
    """A GPU of this machine."""

    name: str
    """The name that its vendor gives it."""
    memory_gib: float


def add_own_gpus(site: Site) -> Site:
    """Return a site without a scheduler with the GPUs of this machine, if its file names none; other sites as is."""
    if site.scheduler != "local" or any(partition.gpu for partition in site.partitions.values()):
        return site
    variable, gpus = list_own_gpus()
    if not gpus:
        return site
    least = min(gpus, key=lambda gpu: gpu.memory_gib)
    name = choose_gpu_name(f"{least.name} {least.memory_gib:.0f}g")
    figures = site.gpus
    if name is None or name not in GPU_CATALOGUE:
        name = re.sub(r"[^a-z0-9]+", "-", least.name.lower()).strip("-") or "gpu"
        figures = figures | {name: GpuFigures(memory_gib=least.memory_gib)}
    label, partition = next(iter(site.partitions.items()))
    own = replace(partition, gpu=name, gpus_per_node=len(gpus), gpu_variable=partition.gpu_variable or variable)
    return replace(site, partitions=site.partitions | {label: own}, gpus=figures)


def describe_own_gpus(site: Site) -> list[str]:
    """Return a line for each kind of node that gets GPUs of this machine."""
    return [
        f"this machine has {own.gpus_per_node} GPUs ({own.gpu}), of {own.gpu_variable}"
        for label, own in add_own_gpus(site).partitions.items()
        if own != site.partitions[label]
    ]


def list_own_gpus() -> tuple[DeviceVariable | None, list[OwnGpu]]:
    """Return the GPUs that this process may use, and the variable that gives a worker its own; none where none are."""
    named = {name: os.environ[name].split(",") for name in DEVICE_VARIABLES if name in os.environ}
    for variables, gpus in (
        (("CUDA_VISIBLE_DEVICES",), _list_nvidia_gpus()),
        (("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), _list_amd_gpus()),
    ):
        if gpus:
            given = [name for name in variables if name in named]
            visible = [[device for device in named[name] if device.strip() not in HIDDEN] for name in given]
            num = min([len(gpus), *map(len, visible)])
            choices = given or variables
            return next(name for name in DEVICE_VARIABLES if name == choices[0]), gpus[:num]
    return None, []


def _list_nvidia_gpus() -> list[OwnGpu]:
    rows = csv.reader(_run_query(NVIDIA_QUERY).splitlines())
    pairs = [(row[0].strip(), row[1].strip()) for row in rows if len(row) == 2]
    return [OwnGpu(name, int(mib) / 1024) for name, mib in pairs if mib.isdecimal() and int(mib)]


def _list_amd_gpus() -> list[OwnGpu]:
    lines = [line for line in _run_query(AMD_QUERY).splitlines() if "," in line]
    found = []
    for row in csv.DictReader(lines):
        sizes = [value for key, value in row.items() if key and value and key.startswith("VRAM Total Memory")]
        names = [value for key, value in row.items() if key and value and key.lower() in ("card series", "card model")]
        if sizes and sizes[0].isdecimal() and int(sizes[0]):
            found.append(OwnGpu(names[0] if names else "amd gpu", int(sizes[0]) / 2**30))
    return found


def _run_query(command: tuple[str, ...]) -> str:
    """Return what a vendor's program prints; nothing where it is absent, fails or hangs, as without a driver."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
