"""The environment AgentProgram as far as it is known without an import: its limits, and the paths that it names.

ProgramLimits, read_program_limits  the memory and disk of one program, for the planner
reserves_place                      whether memory is reserved for each episode of a domain
is_registry_image                   whether an image is pulled from a registry
resolve_options                     the options of an environment with absolute paths
AGENT_PROGRAM                       its name in a recipe
PATH_OPTIONS, COMMAND_OPTIONS       options that name files, by environment; those of AgentProgram that are commands
INTERPRETERS                        programs whose first argument is a script, unless it is an option
DEFAULT_MAX_MEMORY_MB, DEFAULT_MAX_DISK_MB  defaults of its options
RENAMED_OPTIONS                     old options of environments and their new names, for error messages
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.recipe import DomainConfig

AGENT_PROGRAM = "hpcrl.envs.agent:AgentProgram"
PATH_OPTIONS = {
    AGENT_PROGRAM: ("readable", "judge_readable", "directory", "image", "image_cache"),
    "hpcrl.envs.verifiers:Verifiers": ("python",),
}
COMMAND_OPTIONS = ("command", "judge")
RENAMED_OPTIONS = {AGENT_PROGRAM: {"memory_gib": "max_memory_mb", "file_gib": "max_disk_mb"}}
INTERPRETERS = re.compile(r"(python|python3(\.\d+)?|node|bash|sh)")
DEFAULT_MAX_MEMORY_MB = 4096
DEFAULT_MAX_DISK_MB = 2048
_MB_PER_GIB = 1024


class ProgramLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that one program of a domain may use."""

    max_memory_mb: float
    max_disk_mb: float
    num_disks: int
    """A program and its judge have a disk each."""
    has_disks_in_memory: bool
    """True in bubblewrap, where files count as memory; else they are in the scratch directory of the node."""

    @property
    def memory_gib(self) -> float:
        """The memory, with the files that are in it."""
        files_mb = self.num_disks * self.max_disk_mb if self.has_disks_in_memory else 0
        return (self.max_memory_mb + files_mb) / _MB_PER_GIB

    @property
    def scratch_gib(self) -> float:
        return 0.0 if self.has_disks_in_memory else self.num_disks * self.max_disk_mb / _MB_PER_GIB


def read_program_limits(domain: DomainConfig) -> ProgramLimits | None:
    """Return the limits of a domain's programs; None for another environment, and for options of a wrong type."""
    if domain.env != AGENT_PROGRAM or domain.python is not None:
        return None
    options = domain.options
    memory, disk = (
        _read_number(options.get(name, default))
        for name, default in (("max_memory_mb", DEFAULT_MAX_MEMORY_MB), ("max_disk_mb", DEFAULT_MAX_DISK_MB))
    )
    if memory is None or disk is None:  # refused where the environment is made
        return None
    sandbox = options.get("sandbox", "auto")
    return ProgramLimits(
        max_memory_mb=memory,
        max_disk_mb=disk,
        num_disks=1 if options.get("judge") is None else 2,
        has_disks_in_memory=sandbox == "bubblewrap" or (sandbox == "auto" and options.get("image") is None),
    )


def reserves_place(domain: DomainConfig) -> bool:
    """Return whether an env worker reserves memory for each episode of a domain."""
    return domain.isolation != "none" or domain.env == AGENT_PROGRAM


def is_registry_image(image: str | None) -> bool:
    """Return whether an image is pulled from a registry, as docker://NAME is."""
    return image is not None and re.match(r"[a-z][a-z0-9+-]*://", image) is not None


def _read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def resolve_options(env: str, options: dict[str, Any], *, find_folder: Callable[[str], Path]) -> dict[str, Any]:
    """Return the options with the paths that are known to be paths made absolute; values of a wrong type stay.

    `find_folder` finds the folder of the TOML file that sets an option: a file or directory is looked for there, then
    in the current directory. In a command, the program and the script of an interpreter are paths where such a file is
    there; with `directory` an episode starts in a copy of that, where its command finds its own.
    """
    resolved = dict(options)
    for name in PATH_OPTIONS.get(env, ()):
        value, beside = options.get(name), find_folder(name)
        if isinstance(value, str):
            resolved[name] = _resolve_path(value, beside=beside)
        elif isinstance(value, list):
            resolved[name] = [_resolve_path(part, beside=beside) if isinstance(part, str) else part for part in value]
    if env != AGENT_PROGRAM:
        return resolved
    for name in COMMAND_OPTIONS:
        command = options.get(name)
        has_files = name == "command" and options.get("directory") is not None
        if isinstance(command, list) and all(isinstance(part, str) for part in command) and not has_files:
            resolved[name] = _resolve_command(command, beside=find_folder(name))
    return resolved


def _resolve_command(command: list[str], *, beside: Path) -> list[str]:
    if not command:
        return command
    program, *arguments = command
    if arguments and INTERPRETERS.fullmatch(Path(program).name) and not arguments[0].startswith("-"):
        arguments[0] = _resolve_file(arguments[0], beside=beside)
    return [_resolve_file(program, beside=beside) if "/" in program else program, *arguments]


def _resolve_file(path: str, *, beside: Path) -> str:
    """Return the absolute path of a file that is there; else the path as it is."""
    if _is_fixed(path):
        return path
    return next((str(file.absolute()) for file in (beside / path, Path(path)) if file.is_file()), path)


def _resolve_path(path: str, *, beside: Path) -> str:
    """Return an absolute path; of a template only what is before its first field can be there."""
    if _is_fixed(path):
        return path
    known = path.partition("{")[0].rpartition("/")[0] if "{" in path else path
    return str(((beside if (beside / known).exists() else Path()) / path).absolute())


def _is_fixed(path: str) -> bool:
    """Return whether a path is absolute, or something else that is not relative to a directory."""
    return not path or path.startswith(("/", "~", "$", "{")) or is_registry_image(path)
