"""Make hpcrl's wheel, and an environment with it and nothing but what it asks for.

build_wheel        make wheel and sdist
install_wheel      an environment that sees no other packages than those that the wheel needs for one machine
run_installed      run a program of it
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(directory: Path) -> Path:
    """Make wheel and sdist in a directory; return the wheel."""
    hatchling = pytest.importorskip("hatchling.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        hatchling.build_wheel(str(directory))
        hatchling.build_sdist(str(directory))
    (wheel,) = directory.glob("hpcrl-*.whl")
    return wheel


def install_wheel(wheel: Path, root: Path) -> Path:
    """Install the wheel into a new environment, beside links to what `hpcrl[local]` needs; return its programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    (packages,) = root.glob("lib/python*/site-packages")
    (installed,) = Distribution.discover(name="hpcrl", path=[str(packages)])
    for path in _list_needed(installed, ("local",), set()):
        link = packages / path.name
        if not link.exists():
            link.symlink_to(path)
    return root / "bin"


def run_installed(program: Path, *words: str, cwd: Path) -> str:
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(cwd), "HPCRL_HOME": str(cwd / "home")}
    done = subprocess.run([program, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _list_needed(wanting: Distribution, extras: Iterable[str], seen: set[tuple[str, str]]) -> Iterator[Path]:
    """Yield the packages, modules and records of all distributions that another needs, with these of its extras."""
    for extra in ("", *extras):
        for line in wanting.requires or ():
            needed = Requirement(line)
            is_wanted = needed.marker is None or needed.marker.evaluate({"extra": extra})
            if is_wanted and (key := (needed.name.lower(), ",".join(sorted(needed.extras)))) not in seen:
                seen.add(key)
                found = distribution(needed.name)
                yield from _list_files(found)
                yield from _list_needed(found, needed.extras, seen)


def _list_files(found: Distribution) -> Iterator[Path]:
    tops = {path.parts[0] for path in found.files or () if path.parts[0] != ".."}
    for name in tops - {"__pycache__"}:
        yield Path(str(found.locate_file(name)))
