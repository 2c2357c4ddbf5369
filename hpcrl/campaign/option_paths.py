"""Paths in the options of environments, made absolute: a relative one would mean another directory on a node.

resolve_options   the options of one environment
"""

import re
from pathlib import Path
from typing import Any

from hpcrl.config.program import AGENT_PROGRAM, COMMAND_OPTIONS, PATH_OPTIONS
from hpcrl.envs.program_files import INTERPRETERS


def resolve_options(env: str, options: dict[str, Any], *, beside: Path) -> dict[str, Any]:
    """Return the options with the paths that are known to be paths made absolute; values of a wrong type stay.

    A file or directory is looked for beside the recipe, then in the current directory. In a command, the program and
    the script of an interpreter are paths where such a file is there; with `directory` an episode starts in a copy of
    that, where its command finds its own.
    """
    resolved = dict(options)
    for name in PATH_OPTIONS.get(env, ()):
        value = options.get(name)
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
            resolved[name] = _resolve_command(command, beside=beside)
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
    return not path or path.startswith(("/", "~", "$", "{")) or re.match(r"[a-z][a-z0-9+-]*://", path) is not None
