"""The start of every step on the nodes of a partition: prologue, variables, directories, image. The one place for them.

make_step_setup     the words before the command of a step, and its interpreter
make_step_script    the script that prepares a node and runs the command; None if steps there need none
write_step_setups   store both for the partitions of a campaign
read_step_setup     read what a partition's steps start with
StepSetup           the record
choose_step_python  the interpreter of steps
EXECUTION_WORDS, SRUN_FLAGS   how each program, or srun itself, runs a command in an image

Of the programs, apptainer's and bubblewrap's words were run; those of the others are from their documentation.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import ContainerTool, Site, SitePartition
from hpcrl.hardware.gpus import GpuMaker
from hpcrl.plan.plan import Plan
from hpcrl.slurm.script import quote_expanding, read_prologue
from hpcrl.system.files import make_private_dir, publish_file, remove_path

CACHE_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "CUDA_CACHE_PATH": "cuda",
}
"""The variables by which compilers are given a directory for what they have compiled, and its name."""


class StepSetup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The start of the steps of a partition."""

    words: list[str] = []
    """The words before the command of a step."""
    srun_flags: list[str] = []
    python: str | None = None
    """None: the driver's own."""


ImageWords = Callable[[str, Sequence[str], GpuMaker | None], list[str]]
"""A function that makes words, quoted for bash, from an image, the directories bound in it, and the GPUs' maker."""


def _run_apptainer(program: str, image: str, binds: Sequence[str], maker: GpuMaker | None) -> list[str]:
    gpu = {None: [], "nvidia": ["--nv"], "amd": ["--rocm"]}[maker]
    return [program, "exec", *gpu, *(f"--bind={path}" for path in binds), image]


def _run_podman(image: str, binds: Sequence[str], maker: GpuMaker | None) -> list[str]:
    own = ["--rm", "--env-host", "--network=host", "--ipc=host", "--pid=host", *(["--gpu"] if maker else [])]
    return ["podman-hpc", "run", *own, *(f"--volume={path}:{path}" for path in binds), image]


def _run_bubblewrap(image: str, binds: Sequence[str], maker: GpuMaker | None) -> list[str]:
    del maker
    devices = ["--dev-bind", "/dev", "/dev", "--proc", "/proc", "--bind", "/tmp", "/tmp"]
    own = [word for path in binds for word in ("--bind", path, path)]
    return ["bwrap", "--bind", image, "/", *devices, *own, "--"]


EXECUTION_WORDS: dict[ContainerTool, ImageWords] = {
    "apptainer": lambda *image: _run_apptainer("apptainer", *image),
    "singularity": lambda *image: _run_apptainer("singularity", *image),
    "podman-hpc": _run_podman,
    "enroot": lambda image, binds, _: ["enroot", "start", *(f"--mount={path}:{path}" for path in binds), image],
    "shifter": lambda image, binds, _: ["shifter", f"--image={image}", *(f"--volume={path}:{path}" for path in binds)],
    "bubblewrap": _run_bubblewrap,
}
SRUN_FLAGS: dict[ContainerTool, Callable[[str, Sequence[str]], list[str]]] = {
    "pyxis": lambda image, binds: [
        f"--container-image={image}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in binds)}",
    ],
    "container-engine": lambda image, _: [f"--environment={image}"],
}


def make_step_setup(site: Site, partition: str, *, script: Path | None, binds: Sequence[str]) -> StepSetup:
    """Return the start of steps on a partition; `script` is that of `make_step_script`, where there is one."""
    image = site.choose_image(partition)
    make_flags = SRUN_FLAGS.get(site.container) if image is not None and site.container is not None else None
    return StepSetup(
        words=["bash", str(script)] if script is not None else [],
        srun_flags=make_flags(os.path.expandvars(str(image)), binds) if make_flags is not None else [],
        python=site.partitions[partition].python if image is None else site.image_python,
    )


def make_step_script(site: Site, partition: str, *, driver_prologue: str | None, binds: Sequence[str]) -> str | None:
    """Return the script of a partition; None if steps there need nothing but their command.

    The prologue that the driver had is not applied again: steps get the driver's variables.
    """
    part, prologue = site.partitions[partition], site.choose_prologue(partition)
    lines = []
    if prologue is not None and prologue != driver_prologue:
        lines += ["set +eu", read_prologue(prologue).rstrip(), "set -eu"]
    lines += [
        f"export {name}={quote_expanding(value)}" for name, value in (site.environment | part.environment).items()
    ]
    lines += _make_directory_lines(site, part)
    image = _make_image_words(site, partition, binds=binds)
    if not lines and not image:
        return None
    head = ["#!/bin/bash", f"# Every step on nodes of partition {partition!r} starts with this.", "set -eu"]
    run = " ".join(["exec", *image, '"${hpcrl_step[@]}"'])
    return "\n".join([*head, 'hpcrl_step=("$@")', *lines, run, ""])


def write_step_setups(campaign: CampaignDir, plan: Plan, site: Site, *, paths: Iterable[str] = ()) -> None:
    """Store the setups of the partitions of a plan; `paths` are directories that steps need, such as models."""
    code = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    binds = list(dict.fromkeys([str(campaign.root), *map(os.path.abspath, code), *paths, *site.image_binds]))
    jobs = [plan.reward_jobs.partition] if plan.reward_jobs is not None else []
    remove_path(campaign.steps)
    for label in dict.fromkeys([*(component.partition for component in plan.components), *jobs]):
        path = campaign.steps / f"{label}.sh"
        text = make_step_script(site, label, driver_prologue=plan.prologue, binds=binds)
        setup = make_step_setup(site, label, script=path if text is not None else None, binds=binds)
        if setup == StepSetup():
            continue
        make_private_dir(campaign.steps)
        if text is not None:
            publish_file(path, text, mode=0o700)
        publish_file(path.with_suffix(".json"), msgspec.json.encode(setup))


def read_step_setup(campaign: CampaignDir, partition: str) -> StepSetup:
    """Read the start of steps on a partition; without a record they start with their command."""
    try:
        return msgspec.json.decode((campaign.steps / f"{partition}.json").read_bytes(), type=StepSetup)
    except FileNotFoundError:
        return StepSetup()


def choose_step_python(setup: StepSetup) -> str:
    """Return the interpreter of steps."""
    return setup.python or sys.executable


def _make_directory_lines(site: Site, part: SitePartition) -> list[str]:
    """Return the lines that make and name the directories of temporary files and of compiled code."""
    temporary, own_cache = part.temporary_dir or site.temporary_dir, part.cache_dir or site.cache_dir
    cache = own_cache or (f"{temporary}/cache" if temporary else None)
    lines = []
    if temporary is not None:
        lines += [f"export TMPDIR={_quote_path(temporary)}", 'mkdir -p "$TMPDIR"']
    if own_cache is not None:
        lines += [f"mkdir -p {_quote_path(own_cache)}"]
    if cache is not None:
        lines += [f"export {name}={_quote_path(f'{cache}/{folder}')}" for name, folder in CACHE_FOLDERS.items()]
    return lines


def _make_image_words(site: Site, partition: str, *, binds: Sequence[str]) -> list[str]:
    image = site.choose_image(partition)
    if image is None or site.container is None or site.container not in EXECUTION_WORDS:
        return []
    quoted = [*_list_node_binds(site, partition, binds=binds), *map(_quote_path, binds)]
    words = EXECUTION_WORDS[site.container](_quote_path(image), quoted, site.find_gpu_maker(partition))
    at = 1 if site.container in ("bubblewrap", "shifter") else 2  # the others have a verb first
    return [*words[:at], *map(quote_expanding, site.image_flags), *words[at:]]


def _list_node_binds(site: Site, partition: str, *, binds: Sequence[str]) -> list[str]:
    """Return the directories of temporary files and of compiled code that are not in `binds`, quoted for bash."""
    part = site.partitions[partition]
    temporary, cache = part.temporary_dir or site.temporary_dir, part.cache_dir or site.cache_dir
    found = [quote_expanding("$TMPDIR")] if temporary is not None and temporary not in binds else []
    return found + ([_quote_path(cache)] if cache is not None and cache not in (*binds, temporary) else [])


def _quote_path(path: str) -> str:
    return quote_expanding(f"$HOME{path[1:]}" if path == "~" or path.startswith("~/") else path)
