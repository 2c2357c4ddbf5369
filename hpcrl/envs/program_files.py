"""The files that the command of an agent program needs and does not find, or not in its sandbox.

    find_command_problems  the program, its interpreter, and the script or module that Python is given
    find_path_problem      a path that must be there
    ProgramProblem         why a program cannot work
    ProblemJudge           whether a problem that is found here is one of the nodes too
    list_shown_paths       what a sandbox without an image shows
    fill_template          put the fields of a task into a path
    fill_arguments         put them into the arguments of a program
    TASK_FIELD, INSIDE_DIRS, MODULE_TIMEOUT_S, SUBJECT_END  constants

On the login node it is known that nodes lack a file only if they share its file system; PATH and other variables are
those of the job only if its site has no prologue that sets them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.program import INTERPRETERS
from hpcrl.envs.isolation.sandbox import SYSTEM_DIRS, SYSTEM_FILES, list_readable_paths
from hpcrl.errors import EnvFault
from hpcrl.system.file_systems import is_shared_path

TASK_FIELD = re.compile(r"\{(\w+)\}")

INSIDE_DIRS = ("/episode/", "/dev/", "/proc/")
"""Directories of a sandbox, in which a path is not one of this machine."""
MODULE_TIMEOUT_S = 30.0
SUBJECT_END = "\0"
"""Ends the name of each piece of user code that hpcrl.envs.check runs, in its output."""
_FIND_MODULE = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print("" if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), "frozen"))
"""


class ProgramProblem(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a program cannot work, as far as this machine shows."""

    text: str
    """Starts with the option and its value."""
    places: tuple[str, ...] = ()
    """The paths where something is missing; a node may have it where it does not share their file systems, and with
    "" it always may."""
    depends_on_variables: bool = False
    """True if PATH or another variable decides."""


class ProblemJudge(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that decide whether a problem found here is one of the nodes too."""

    is_local: bool = False
    """True without a scheduler: this machine is the node."""
    has_prologue: bool = False
    """True if the site's prologue may set variables."""
    campaigns: str = ""
    """The directory of campaigns, which all nodes share; "": it is not known here."""

    def is_certain(self, problem: ProgramProblem) -> bool:
        if self.is_local:
            return True
        if problem.depends_on_variables and self.has_prologue:
            return False
        return all(is_shared_path(place, beside=self.campaigns) for place in problem.places)


def list_shown_paths(*readable: str) -> tuple[str, ...]:
    """Return the paths that a sandbox without an image shows."""
    return (*SYSTEM_DIRS, *SYSTEM_FILES, *list_readable_paths(*readable))


def find_path_problem(path: str, *, what: str, kind: str = "file or directory") -> ProgramProblem | None:
    """Return the problem of a path that must be there; None if it is. `what` is the option with its value."""
    if os.path.isdir(path) if kind == "directory" else os.path.exists(path):  # noqa: PTH110, PTH112 - long names
        return None
    if variable := re.search(r"\$\w+|\$\{\w+\}", path):
        why = f"{variable[0]} is not set here: export it, or write the path out"
        return ProgramProblem(text=f"{what}: {why}", places=("",), depends_on_variables=True)
    return ProgramProblem(text=f"{what}: no such {kind}", places=(path,))


def find_command_problems(
    command: Sequence[str],
    *,
    option: str,
    shown: Sequence[str] | None,
    path: str | None,
    has_files: bool,
    readable: str,
    has_own_modules: bool,
) -> Iterator[ProgramProblem]:
    """Yield what a command needs and does not find.

    option     its name, for messages
    shown      the paths that its sandbox shows; None: all
    path       the PATH that the recipe sets for it; None: that of the job
    has_files  whether its working directory has files when it starts
    readable   the option that shows it more
    has_own_modules  whether the recipe sets PYTHONPATH for it
    """
    finder = _FileFinder(option=option, shown=shown, readable=readable)
    program, *arguments = command
    if program != "python":
        search = path or os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        yield from finder.find_program_problem(
            program, path=search, depends_on_variables=path is None, has_files=has_files
        )
    if not INTERPRETERS.fullmatch(Path(program).name) or not arguments:
        return
    if arguments[0] == "-m" and len(arguments) > 1 and program == "python" and not (has_files or has_own_modules):
        yield from finder.find_module_problem(arguments[1])
    elif not arguments[0].startswith("-"):
        yield from finder.find_script_problem(arguments[0], has_files=has_files)


class _FileFinder(msgspec.Struct, frozen=True, kw_only=True):
    """Finds the files of one command."""

    option: str
    shown: Sequence[str] | None
    readable: str

    def find_program_problem(
        self, program: str, *, path: str, depends_on_variables: bool, has_files: bool
    ) -> Iterator[ProgramProblem]:
        what = f"{self.option} = [{program!r}, ...]"
        if "/" not in program:
            yield from self._search_program(program, path=path, depends_on_variables=depends_on_variables)
        elif not program.startswith(("/", "$", "~")):
            if not has_files:
                yield _explain_relative(what, program)
        elif program.startswith(INSIDE_DIRS):
            return
        elif problem := find_path_problem(program, what=what):
            yield problem
        elif not os.access(program, os.X_OK) or Path(program).is_dir():
            yield ProgramProblem(
                text=f"{what}: it is not an executable file (`chmod +x` makes it one)", places=(program,)
            )
        else:
            yield from self._find_hidden(program, what=what)

    def find_script_problem(self, script: str, *, has_files: bool) -> Iterator[ProgramProblem]:
        what = f"{self.option} with {script!r}"
        if not script.startswith(("/", "$", "~")):
            if not has_files:
                yield _explain_relative(what, script)
        elif not script.startswith(INSIDE_DIRS):
            if problem := find_path_problem(script, what=what):
                yield problem
            else:
                yield from self._find_hidden(script, what=what)

    def find_module_problem(self, module: str) -> Iterator[ProgramProblem]:
        what, top = f"{self.option} with -m {module}", module.partition(".")[0]
        try:
            done = subprocess.run(
                [sys.executable, "-c", _FIND_MODULE, top],
                cwd="/",
                capture_output=True,
                text=True,
                timeout=MODULE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:  # on a slow file system, which is not a problem of the program
            return
        origin = done.stdout.strip()
        if done.returncode == 0 and not origin:
            why = f"{sys.executable} finds no module {top!r}: install it there, or add its directory to PYTHONPATH"
            yield ProgramProblem(text=f"{what}: {why}", places=(sys.prefix,))
        elif origin.startswith("/"):
            yield from self._find_hidden(origin, what=what)

    def _search_program(self, program: str, *, path: str, depends_on_variables: bool) -> Iterator[ProgramProblem]:
        """Search PATH as the sandbox would: what it does not show is not found."""
        what = f"{self.option} = [{program!r}, ...]"
        places = [place for place in path.split(os.pathsep) if place]
        found = [file for file in (os.path.join(place, program) for place in places) if _is_executable(file)]  # noqa: PTH118
        hidden = [(file, problem) for file in found for problem in self._find_hidden(file, what=f"{what} is {file!r}")]
        if not found:
            yield ProgramProblem(
                text=f"{what}: no such program on PATH ({path[:200]}): write its whole path, or set environment.PATH",
                places=tuple(places),
                depends_on_variables=depends_on_variables,
            )
        elif len({file for file, _ in hidden}) == len(found):
            yield msgspec.structs.replace(hidden[0][1], places=tuple(places), depends_on_variables=depends_on_variables)

    def _find_hidden(self, file: str, *, what: str) -> Iterator[ProgramProblem]:
        """Yield the problem of a file, or of the interpreter that its first line names, that is not shown."""
        why = ""
        interpreter = _read_interpreter(file)
        if not self._is_shown(file):
            why = f"the sandbox does not show {_describe_file(file)}: add it to {self.readable}"
        elif interpreter and not os.path.exists(interpreter):  # noqa: PTH110 - long names
            why = f"its first line names {interpreter!r}, which is not there: install the program again"
        elif interpreter and not self._is_shown(interpreter):
            shown_by = f"which the sandbox does not show: add it to {self.readable}"
            why = f"it is run by {_describe_file(interpreter)}, {shown_by}"
        if why:
            yield ProgramProblem(text=f"{what}: {why}", places=(file, interpreter) if interpreter else (file,))

    def _is_shown(self, file: str) -> bool:
        """Return whether the sandbox shows a file, and what it links to."""
        if self.shown is None:
            return True
        real = os.path.realpath(file)
        return any(Path(file).is_relative_to(place) for place in self.shown) and any(
            Path(real).is_relative_to(os.path.realpath(place)) for place in self.shown
        )


def _explain_relative(what: str, path: str) -> ProgramProblem:
    return ProgramProblem(
        text=f"{what}: {path!r} is neither beside the TOML file that sets it nor in the current directory, and an "
        "episode starts in an empty directory: write its whole path"
    )


def _describe_file(file: str) -> str:
    real = os.path.realpath(file)
    return repr(file) if real == file else f"{file!r} ({real})"


def _is_executable(file: str) -> bool:
    return os.path.isfile(file) and os.access(file, os.X_OK)  # noqa: PTH113 - long names


def _read_interpreter(file: str) -> str:
    """Return the interpreter that the first line of a script names; "" for other files, and for `env`."""
    try:
        with open(file, "rb") as script:  # noqa: PTH123
            line = script.readline(4096)
    except OSError:
        return ""
    name = line.removeprefix(b"#!").split()[:1] if line.startswith(b"#!") else []
    return os.fsdecode(name[0]) if name and name[0].startswith(b"/") else ""


def fill_arguments(command: Sequence[str], fields: Mapping[str, Any]) -> list[str]:
    """Replace each {field} of the task in the arguments of a program; other braces are the program's own."""

    def fill_field(match: re.Match[str]) -> str:
        value = fields.get(match[1], match[0])
        return (value if isinstance(value, str) else json.dumps(value)).replace("\0", "")

    return [command[0], *(TASK_FIELD.sub(fill_field, word) for word in command[1:])]


def fill_template(template: str, fields: Mapping[str, Any], *, what: str) -> str:
    """Replace each {field} by the task's value; raises EnvFault for one that is missing or cannot be in a path."""

    def fill_field(match: re.Match[str]) -> str:
        name = match[1]
        if name not in fields:
            raise EnvFault(f"{what} = {template!r}: the task has no field {name!r}; it has {', '.join(sorted(fields))}")
        value = fields[name]
        is_plain = isinstance(value, str | int) and str(value).isprintable() and ".." not in str(value).split("/")
        if not is_plain or not str(value):
            raise EnvFault(f"{what} = {template!r}: the task's {name} = {value!r:.100} cannot be part of a path")
        return str(value)

    return TASK_FIELD.sub(fill_field, template)
