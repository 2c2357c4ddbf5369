"""What is known of the environment AgentProgram without importing it: its limits, and the paths that it names. Pure.

ProgramLimits, read_program_limits  the memory and disk of one program, for the planner
AGENT_PROGRAM                       its name in a recipe
PATH_OPTIONS, COMMAND_OPTIONS       options that name files, by environment; those of AgentProgram that are commands
DEFAULT_MAX_MEMORY_MB, DEFAULT_MAX_DISK_MB  defaults of its options
"""

from typing import Any

import msgspec

from hpcrl.config.recipe import DomainConfig

AGENT_PROGRAM = "hpcrl.envs.agent:AgentProgram"
PATH_OPTIONS = {
    AGENT_PROGRAM: ("readable", "judge_readable", "directory", "image", "image_cache"),
    "hpcrl.envs.verifiers:Verifiers": ("python",),
}
COMMAND_OPTIONS = ("command", "judge")
DEFAULT_MAX_MEMORY_MB = 4096
DEFAULT_MAX_DISK_MB = 2048
_MB_PER_GIB = 1024


class ProgramLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one program of a domain may use, at most."""

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


def _read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
