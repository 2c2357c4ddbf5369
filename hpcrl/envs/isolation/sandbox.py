"""Sandboxes for untrusted code: apptainer, else bubblewrap; without one nothing is run unless that is allowed.

    choose_sandbox       find the sandbox to use on this node; refuse if there is none
    wrap_command         the command line that runs a command in a sandbox
    list_readable_paths  paths that Python and hpcrl need inside
    SandboxSpec          the content of one sandbox
    SandboxChoice, SandboxKind, SYSTEM_DIRS, SYSTEM_FILES, PROBE_TIMEOUT_S  types and constants

A command inside has no network but a private loopback, and sees no process but its own and no file but the system's
programs, the paths of `list_readable_paths` and its working directory. Secrets are passed by the environment: command
lines are public.
"""

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.errors import EnvFault

SandboxChoice = Literal["auto", "apptainer", "bubblewrap", "none"]
SandboxKind = Literal["apptainer", "bubblewrap", "none"]
SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ssl", "/etc/ld.so.cache")
SYSTEM_FILES = ("/etc/passwd", "/etc/group", "/etc/localtime", "/etc/nsswitch.conf", "/etc/mime.types")
PROBE_TIMEOUT_S = 20.0


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The kind of a sandbox, and the files that are visible inside."""

    kind: SandboxKind
    workdir: str
    """The only directory that it can write to, besides an empty /tmp."""
    readable: tuple[str, ...] = ()
    image: str | None = None
    """The system image, for apptainer."""


def choose_sandbox(wanted: SandboxChoice, *, image: str | None) -> SandboxKind:
    """Return the sandbox to use; raises EnvFault if the wanted one is not available."""
    if wanted == "none":
        return "none"
    if wanted in ("auto", "apptainer") and image and shutil.which("apptainer"):
        return "apptainer"
    if wanted in ("auto", "bubblewrap") and not _find_bubblewrap_problem():
        return "bubblewrap"
    apptainer = "needs an `image`" if shutil.which("apptainer") else "is not installed"
    raise EnvFault(
        f'sandbox = "{wanted}" is not available on this node: apptainer {apptainer}, '
        f"{_find_bubblewrap_problem() or 'bwrap works'}: "
        'install one of them, or allow code without a sandbox by sandbox = "none"'
    )


def wrap_command(command: Sequence[str], spec: SandboxSpec) -> list[str]:
    """Return the command line that runs `command` inside."""
    match spec.kind:
        case "none":
            return list(command)
        case "bubblewrap":
            return [*_build_bubblewrap_args(spec), "--", *command]
        case "apptainer":
            return [*_build_apptainer_args(spec), *command]


def list_readable_paths(*more: str) -> tuple[str, ...]:
    """Return the paths of Python, its packages and hpcrl, and those given."""
    package = Path(__file__).resolve().parents[2]
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), str(package)]
    places += [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return tuple(dict.fromkeys(str(Path(place)) for place in [*places, *more] if Path(place).exists()))


def _build_bubblewrap_args(spec: SandboxSpec) -> list[str]:
    seen = [argument for path in SYSTEM_DIRS + SYSTEM_FILES for argument in ("--ro-bind-try", path, path)]
    own = [argument for path in spec.readable for argument in ("--ro-bind", path, path)]
    return [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        *seen,
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),  # private to the sandbox
        *own,
        *("--bind", spec.workdir, spec.workdir),
        *("--chdir", spec.workdir),
    ]


def _build_apptainer_args(spec: SandboxSpec) -> list[str]:
    assert spec.image is not None, "chosen with an image only"
    own = [argument for path in spec.readable for argument in ("--bind", f"{path}:{path}:ro")]
    return [
        *("apptainer", "--silent", "exec", "--containall", "--no-home", "--no-init"),
        *("--net", "--network", "none"),
        *own,
        *("--bind", f"{spec.workdir}:{spec.workdir}", "--pwd", spec.workdir),
        spec.image,
    ]


@cache
def _find_bubblewrap_problem() -> str:
    """Return why bubblewrap cannot be used here, after trying it once; "" if it can."""
    program = shutil.which("bwrap")
    if program is None:
        return "bwrap is not installed"
    tried = [program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--", "true"]
    try:
        done = subprocess.run(tried, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}"
    return "" if done.returncode == 0 else f"bwrap is refused by the kernel: {done.stderr.strip()[-200:]}"
