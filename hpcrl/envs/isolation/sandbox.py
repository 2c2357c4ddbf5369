"""Sandboxes for untrusted code: apptainer with an image, else bubblewrap; nothing runs without one unless allowed.

    choose_sandbox       find the sandbox to use on this node; refuse if there is none
    find_apptainer       the command name of apptainer on this node
    wrap_command         the command line that runs a command in a sandbox
    wrap_with_disks      the command line that runs a command with disks of a fixed size, which end with it
    list_readable_paths  paths that Python and hpcrl need inside
    find_disk_problem, find_task_problem  why the kernel does not limit the disk, or the tasks, of a sandbox as a whole
    SandboxSpec          the content of one sandbox
    SandboxChoice, SandboxKind, SYSTEM_DIRS, SYSTEM_FILES, PROBE_TIMEOUT_S  types and constants

A command inside has no network but a private loopback, and sees no process but its own and no file but the system's
programs, the paths of `list_readable_paths` and its working directory. It can write to nothing but what is bound for
that, and cannot make a namespace, in which it could mount more. Secrets are passed by the environment: command lines
are public.
"""

import os
import platform
import re
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
MIN_KERNEL = (5, 14)
"""The first kernel that counts the tasks of a user namespace separately from others of the same user."""
_PROBE_MAX_TASKS = 16
_FORK_PROBE = f"""
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NPROC, ({_PROBE_MAX_TASKS}, {_PROBE_MAX_TASKS}))
started = 0
try:
    for _ in range({_PROBE_MAX_TASKS}):
        if os.fork() == 0:
            time.sleep(60)
        started += 1
except OSError:
    pass
os.write(1, str(started).encode())
os._exit(0)
"""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The kind of a sandbox, and the files that are visible inside."""

    kind: SandboxKind
    workdir: str
    """The directory of the command, which it can write to."""
    writable: tuple[tuple[str, str], ...] = ()
    """Other directories that it can write to, each with its place inside; /tmp is empty if it is not one of them."""
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Files and directories in them that are not to be read."""
    image: str | None = None
    """The system image, for apptainer."""
    is_first: bool = False
    """True if bubblewrap makes the command process 1: no process inside can kill it, and there is none above it whose
    descriptors could be opened. It must reap the others. With apptainer it always is."""


def choose_sandbox(wanted: SandboxChoice, *, image: str | None) -> SandboxKind:
    """Return the sandbox to use; raises EnvFault if the wanted one is not available."""
    if wanted == "none":
        return "none"
    apptainer = find_apptainer()
    if wanted in ("auto", "apptainer") and image and apptainer:
        return "apptainer"
    if wanted == "auto" and image:
        raise EnvFault(
            f"image = {image!r} needs apptainer, which is not installed on this node: install it, or ignore the image "
            'by sandbox = "bubblewrap"'
        )
    if wanted in ("auto", "bubblewrap") and not _find_bubblewrap_problem():
        return "bubblewrap"
    raise EnvFault(
        f'sandbox = "{wanted}" is not available on this node: apptainer '
        f"{'needs an `image`' if apptainer else 'is not installed'}, {_find_bubblewrap_problem() or 'bwrap works'}: "
        'install one of them, or allow code without a sandbox by sandbox = "none"'
    )


def find_apptainer() -> str:
    """Return the command name of apptainer here, which is singularity on some nodes; "" if it is not installed."""
    return next((name for name in ("apptainer", "singularity") if shutil.which(name)), "")


def wrap_command(command: Sequence[str], spec: SandboxSpec) -> list[str]:
    """Return the command line that runs `command` inside."""
    match spec.kind:
        case "none":
            return list(command)
        case "bubblewrap":
            return [*_build_bubblewrap_args(spec), *_list_hardening_args(), "--", *command]
        case "apptainer":
            return [*_build_apptainer_args(spec), *command]


def wrap_with_disks(command: Sequence[str], disks: Sequence[str], *, max_mb: int) -> list[str]:
    """Return the command line that runs `command` where each of `disks` is a separate file system in memory."""
    mounted = [argument for disk in disks for argument in ("--size", str(max_mb << 20), "--tmpfs", disk)]
    return ["bwrap", "--unshare-user", "--die-with-parent", "--dev-bind", "/", "/", *mounted, "--", *command]


def list_readable_paths(*more: str) -> tuple[str, ...]:
    """Return the paths of Python, its packages and hpcrl, and those given.

    An entry of PYTHONPATH that contains the home directory is left out: it would show the user's keys.
    """
    package = Path(__file__).resolve().parents[2]
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), str(package)]
    home = Path.home().resolve()
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    places += [entry for entry in entries if not home.is_relative_to(Path(entry).resolve())]
    found = [Path(place) for place in [*places, *more] if Path(place).exists()]
    # A link in a directory that is bound, such as an environment on another disk, needs what it leads to.
    return tuple(dict.fromkeys(str(path) for one in found for path in (one, one.resolve())))


def _build_bubblewrap_args(spec: SandboxSpec) -> list[str]:
    seen = [argument for path in SYSTEM_DIRS + SYSTEM_FILES for argument in ("--ro-bind-try", path, path)]
    own = [argument for path in spec.readable for argument in ("--ro-bind", path, path)]
    for path in spec.hidden:
        own += ["--tmpfs", path, "--remount-ro", path] if Path(path).is_dir() else ["--ro-bind", os.devnull, path]
    places = {inside: source for source, inside in spec.writable}
    temporary = ("--bind", places.pop("/tmp"), "/tmp") if "/tmp" in places else ("--tmpfs", "/tmp")
    shared_memory = () if "/dev/shm" in places else ("--tmpfs", "/dev/shm")
    if spec.workdir not in places:
        places[spec.workdir] = spec.workdir
    return [
        *("bwrap", *(["--as-pid-1"] if spec.is_first else [])),
        *("--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL"),
        *seen,
        *("--proc", "/proc", "--dev", "/dev", *shared_memory, *temporary),  # private to the sandbox
        *own,
        *[argument for inside, source in places.items() for argument in ("--bind", source, inside)],
        *("--chdir", spec.workdir),
    ]


def _build_apptainer_args(spec: SandboxSpec) -> list[str]:
    assert spec.image is not None, "chosen with an image only"
    own = [argument for path in spec.readable for argument in ("--bind", f"{path}:{path}:ro")]
    own += [argument for path in spec.hidden for argument in ("--bind", f"{os.devnull}:{path}:ro")]
    places = {spec.workdir: spec.workdir} | {inside: source for source, inside in spec.writable}
    return [
        *(find_apptainer() or "apptainer", "--silent", "exec", "--containall", "--cleanenv", "--no-home", "--no-init"),
        *("--net", "--network", "none"),
        *[argument for inside, source in places.items() for argument in ("--bind", f"{source}:{inside}")],
        *own,  # after /tmp, which some are in
        *("--pwd", spec.workdir),
        spec.image,
    ]


@cache
def _find_bubblewrap_problem() -> str:
    """Return why bubblewrap cannot be used here, after trying it once; "" if it can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    return _try_bubblewrap(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--", "true"])[1]


@cache
def _list_hardening_args() -> tuple[str, ...]:
    """Return what keeps a sandbox from mounting more space and from writing elsewhere, where bwrap can do it."""
    wanted = ("--remount-ro", "/", "--remount-ro", "/dev", "--disable-userns")
    root = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    for args in (wanted, wanted[:-1]):
        if not _try_bubblewrap([*root, *args, "--", "true"])[1]:
            return args
    return ()


@cache
def find_disk_problem() -> str:
    """Return why sandboxes have no disk of a fixed size here, after trying it once; "" if they can have one."""
    inner = wrap_command(["true"], SandboxSpec(kind="bubblewrap", workdir="/tmp", writable=(("/tmp", "/tmp"),)))
    return _find_bubblewrap_problem() or _try_bubblewrap(wrap_with_disks(inner, ["/tmp"], max_mb=1))[1]


@cache
def find_task_problem() -> str:
    """Return why the kernel does not count the tasks of each sandbox here, after trying it once; "" if it does."""
    if problem := _find_bubblewrap_problem():
        return problem
    if os.getuid() == 0:
        return "the kernel does not limit the tasks of root"
    numbers = re.findall(r"\d+", platform.release())[:2]
    if tuple(map(int, numbers)) < MIN_KERNEL:
        return f"Linux {platform.release()} counts the tasks of a user, not those of a sandbox"
    spec = SandboxSpec(kind="bubblewrap", workdir="/tmp", writable=(("/tmp", "/tmp"),), readable=list_readable_paths())
    printed, problem = _try_bubblewrap(wrap_command([sys.executable, "-I", "-S", "-c", _FORK_PROBE], spec))
    if problem or 0 < int(printed) < _PROBE_MAX_TASKS:
        return problem
    return f"{printed} of {_PROBE_MAX_TASKS} processes could be started under a limit of {_PROBE_MAX_TASKS}"


def _try_bubblewrap(command: list[str]) -> tuple[str, str]:
    """Return what a command prints, and why it failed; "" if it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"bwrap does not run: {error}"
    return done.stdout, "" if done.returncode == 0 else f"bwrap is refused by the kernel: {done.stderr.strip()[-200:]}"
