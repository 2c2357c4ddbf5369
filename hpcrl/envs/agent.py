"""An agent program as an environment: any command that calls a model by OpenAI's API and is given a reward.

    AgentProgram    run the command once for each episode, in a sandbox, and then its judge command in another
    find_reward     find the reward in the output of a program
    INSIDE_PORT, INSIDE_WORKDIR, INSIDE_HOME, MAX_VARIABLE_CHARS, SUPERVISOR_TIMEOUT_S, INHERITED_VARIABLES,
    MAX_ERROR_CHARS, NUM_RESERVED_TASKS  constants

The program finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment, and its task as one JSON object
on standard input and in HPCRL_TASK: `seed`, the option `task`, and the fields of a row if the domain has `tasks`. Its
reward is that of its judge; without a judge the last line that it prints, as a number or as {"reward": number}; or
what it posts, if posts_reward allows that.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from hpcrl.envs.base import ModelAccess, TaskFields
from hpcrl.envs.examples.answer_files import list_answer_files
from hpcrl.envs.isolation.images import ImageCache, is_remote, open_image
from hpcrl.envs.isolation.program_launcher import ProgramLaunch, ProgramResult
from hpcrl.envs.isolation.sandbox import (
    SYSTEM_DIRS,
    SandboxKind,
    SandboxSpec,
    choose_sandbox,
    find_disk_problem,
    find_task_problem,
    list_readable_paths,
    wrap_command,
    wrap_with_disks,
)
from hpcrl.envs.isolation.supervisor import EpisodeOutcome, EpisodeStages, Stage
from hpcrl.envs.judge_access import keep_judges
from hpcrl.envs.program_files import (
    TASK_FIELD,
    ProgramProblem,
    fill_arguments,
    fill_template,
    find_command_problems,
    find_path_problem,
    list_shown_paths,
)
from hpcrl.envs.program_options import ProgramOptions, read_options
from hpcrl.errors import ConfigError, EnvFault, PolicyFailure
from hpcrl.spool.outcome import OUTCOME_EXIT, OUTCOME_REWARD_ERROR, OUTCOME_TIMEOUT
from hpcrl.system.exit_codes import describe_end

INSIDE_PORT = 8000
"""The port of the model on the loopback of a sandbox, which is private to it."""
INSIDE_WORKDIR = "/episode/work"
INSIDE_HOME = "/episode/home"
"""The same in every sandbox, so that the prompts of a group's episodes are the same."""
MAX_VARIABLE_CHARS = 100_000
"""A longer task is only on standard input: Linux allows no variable of more than 128 KiB."""
SUPERVISOR_TIMEOUT_S = 5.0
"""The time limit of a supervisor for ending all that it started, and for starting it."""
INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
"""The only variables that a program in a sandbox inherits."""
MAX_ERROR_CHARS = 300
"""The end of what a program has written to stderr that is shown."""
NUM_RESERVED_TASKS = 64
"""The kernel allows a few more tasks than max_processes, so that the supervisor sees the excess and reports it."""
_START_CODE = (
    "import sys; sys.path.insert(0, {root!r}); from hpcrl.envs.isolation.{module} import main; sys.exit(main())"
)
_ROOT = Path(__file__).resolve().parents[2]
_MISSED_FILE = re.compile(r"No such file or directory: '/(?!episode/)")
_HIDDEN_FILE = " (if it is there, the sandbox does not show it: add it to {})"
_COPY_WORDS = ("cp", "-dR", "--preserve=mode,timestamps,links", "--")
"""Owners are not kept: they cannot be given here."""
_PASSED_PREFIXES = ("APPTAINERENV_", "SINGULARITYENV_")
_log = logging.getLogger(__name__)


class AgentProgram:
    """An environment that runs `command` for each episode."""

    __signature__ = inspect.signature(ProgramOptions)  # by which options with other names are refused

    def __init__(self, **options: Any) -> None:
        """Take the fields of ProgramOptions."""
        self._options = read_options(options)
        self.sampling = self._options.sampling
        self.trains = self._options.trains
        self.problem = ""
        """The way the program ended, if it failed; with a judge that alone is not a fault."""
        self._images = ImageCache(
            directory=self._options.image_cache,
            max_gib=self._options.image_cache_gib,
            staged=self._options.staged_images,
        )
        if problem := self._find_judge_problem():
            raise ConfigError(f"AgentProgram: {problem}")

    @property
    def names_task_files(self) -> bool:
        """True if a task set has to be read to know which images and directories are needed."""
        return any(self._has_row_fields(template) for template in (self._options.image, self._options.directory))

    def find_problems(self) -> Iterator[ProgramProblem]:
        """Yield what this machine shows of what cannot work, but for what a row of a task set names."""
        if self._options.sandbox != "none":
            for option, path in self._list_given_paths():
                if problem := find_path_problem(path, what=f"{option} has {path!r}"):
                    yield problem
            try:
                choose_sandbox(self._options.sandbox, image=self._options.image)
            except EnvFault as fault:
                yield ProgramProblem(text=str(fault), places=("/usr/bin",))
        yield from self._find_template_problems(self._options.task, of_rows=False)
        if not self._is_in_image:
            yield from self._find_command_problems(
                "command", self._options.command, (), has_files=self._options.directory is not None
            )
            if self._options.judge is not None:
                yield from self._find_command_problems(
                    "judge", self._options.judge, self._options.judge_readable, has_files=False
                )

    def find_task_problems(self, task: TaskFields) -> Iterator[ProgramProblem]:
        """Yield the same for what a row of a task set names."""
        yield from self._find_template_problems(self._make_fields(0, task), of_rows=True)

    def _find_template_problems(self, fields: TaskFields, *, of_rows: bool) -> Iterator[ProgramProblem]:
        for option, template, kind in (
            ("image", self._options.image, "file or directory"),
            ("directory", self._options.directory, "directory"),
        ):
            if template is None or self._has_row_fields(template) != of_rows or "{seed}" in template:
                continue
            try:
                path = fill_template(template, fields, what=option)
            except EnvFault as fault:
                yield ProgramProblem(text=str(fault))
                continue
            if option == "image" and is_remote(path):
                continue
            if problem := find_path_problem(str(Path(path).absolute()), what=f"{option} = {path!r}", kind=kind):
                yield problem
            elif option == "directory" and (secret := self._find_copied_secret(path)):
                yield ProgramProblem(text=secret)

    def _find_command_problems(
        self, option: str, command: Sequence[str], more: Sequence[str], *, has_files: bool
    ) -> Iterator[ProgramProblem]:
        is_confined = self._options.sandbox != "none"
        yield from find_command_problems(
            command,
            option=option,
            shown=list_shown_paths(*self._options.readable, *more) if is_confined else None,
            path=self._options.variables.get("PATH") if option == "command" else None,
            has_files=has_files,
            readable="judge_readable" if option == "judge" else "readable",
            has_own_modules="PYTHONPATH" in self._options.variables and option == "command",
        )

    @property
    def _is_in_image(self) -> bool:
        return self._options.image is not None and self._options.sandbox in ("auto", "apptainer")

    def _has_row_fields(self, template: str | None) -> bool:
        return template is not None and not set(TASK_FIELD.findall(template)) <= set(self._options.task)

    async def run(self, seed: int, access: ModelAccess, task: TaskFields | None = None) -> float | None:
        """Run the program and return its reward, or None if it printed none.

        Raises PolicyFailure if the program or its judge fails, EnvFault if one cannot be started.
        """
        fields = self._make_fields(seed, task)
        image = directory = None
        if self._options.image is not None:
            image = fill_template(self._options.image, fields, what="image")
        if self._options.directory is not None:
            directory = str(Path(fill_template(self._options.directory, fields, what="directory")).absolute())
            if problem := await asyncio.to_thread(self._find_directory_problem, directory):
                raise EnvFault(problem)
        kind = await asyncio.to_thread(choose_sandbox, self._options.sandbox, image=image)
        if kind != "none":
            await asyncio.to_thread(self._check_readable)
        async with contextlib.AsyncExitStack() as stack:
            if kind == "apptainer" and image is not None:
                image = await stack.enter_async_context(open_image(image, self._images))
            root = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="hpcrl-agent-"))  # 0700
            stack.push_async_callback(asyncio.to_thread, _remove_tree, root)
            workdir = self._options.image_directory or INSIDE_WORKDIR
            sandboxes = _SandboxFactory(kind=kind, image=image, root=root, workdir=workdir)
            stages = [self._make_program_stage(sandboxes, fields, access)]
            if self._options.judge is not None:
                stages.append(self._make_judge_stage(sandboxes, fields))
            return self._read_outcome(await self._supervise(stages, sandboxes, directory=directory))

    def _make_fields(self, seed: int, task: TaskFields | None) -> TaskFields:
        """Return the fields of a task, whose seed is that of its row if it has one."""
        return {**self._options.task, **(task or {}), "seed": seed}

    def _make_program_stage(self, sandboxes: "_SandboxFactory", fields: TaskFields, access: ModelAccess) -> Stage:
        given = {name: value for name, value in fields.items() if name not in self._options.judge_fields}
        shown = json.dumps(given)
        forwarded = sandboxes.kind != "none"
        url = f"http://127.0.0.1:{INSIDE_PORT}/v1" if forwarded else access.url
        launch = ProgramLaunch(
            command=fill_arguments(sandboxes.resolve_python(self._options.command), given),
            task=shown,
            environment={
                **self._options.variables,
                **sandboxes.task_variables(shown),
                **{"OPENAI_BASE_URL": url, "OPENAI_API_KEY": access.api_key, "OPENAI_MODEL": access.model},
                **{"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": access.api_key},
            },
            forward_port=INSIDE_PORT if forwarded else 0,
            socket=access.socket,
            reward_key=access.reward_key if self._options.posts_reward else "",
            **self._process_limits(sandboxes),
        )
        return sandboxes.make_stage(
            "program",
            launch,
            readable=(str(Path(access.socket).parent), *self._options.readable),
            environment=_build_environment(sandboxes.kind, judges=self._options.calls_judges),
            timeout_s=self._options.timeout_s,
            timeout_name="timeout_s",
        )

    def _make_judge_stage(self, sandboxes: "_SandboxFactory", fields: TaskFields) -> Stage:
        assert self._options.judge is not None
        task = json.dumps(fields)
        launch = ProgramLaunch(
            command=sandboxes.resolve_python(self._options.judge),
            task=task,
            environment={**sandboxes.module_variables(), **sandboxes.task_variables(task)},
            **self._process_limits(sandboxes),
        )
        return sandboxes.make_stage(
            "judge",
            launch,
            readable=(*self._options.readable, *self._options.judge_readable),
            environment=_build_environment("bubblewrap" if sandboxes.kind == "none" else sandboxes.kind),
            timeout_s=self._options.judge_timeout_s,
            timeout_name="judge_timeout_s",
        )

    def _process_limits(self, sandboxes: "_SandboxFactory") -> dict[str, Any]:
        return {
            "memory_bytes": self._options.max_memory_mb << 20,
            "cpu_s": self._options.cpu_s,
            "file_bytes": self._options.max_disk_mb << 20,
            "max_tasks": self._options.max_processes + NUM_RESERVED_TASKS if sandboxes.counts_tasks else 0,
        }

    async def _supervise(
        self, stages: Sequence[Stage], sandboxes: "_SandboxFactory", *, directory: str | None
    ) -> EpisodeOutcome:
        """Run the stages in a separate process; raises EnvFault if that fails."""
        disks = [str(sandboxes.root / stage.name) for stage in stages]
        episode = EpisodeStages(
            stages=[asdict(stage) for stage in stages],
            directories=sandboxes.directories,
            **self._make_copying(sandboxes, directory),
            max_processes=self._options.max_processes,
            max_memory_mb=self._options.max_memory_mb,
            max_disk_mb=self._options.max_disk_mb,
            disks=disks,
            has_fixed_disks=sandboxes.has_fixed_disks,
        )
        command = [sys.executable, "-I", "-S", "-c", _START_CODE.format(root=str(_ROOT), module="supervisor")]
        if sandboxes.has_fixed_disks:
            for disk in disks:
                await asyncio.to_thread(Path(disk).mkdir, mode=0o700)
            command = wrap_with_disks(command, disks, max_mb=self._options.max_disk_mb)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=keep_judges(os.environ, ()),
            start_new_session=True,
        )
        try:
            output, errors = await process.communicate(json.dumps(asdict(episode)).encode())
        finally:
            await _end_supervisor(process)
        try:
            return EpisodeOutcome(**json.loads(output))
        except (ValueError, TypeError):
            why = errors.decode(errors="replace").strip()[-300:]
            raise EnvFault(f"{self._name}: its supervisor ended with {process.returncode}: {why}") from None

    def _make_copying(self, sandboxes: "_SandboxFactory", directory: str | None) -> dict[str, Any]:
        """Return the command that fills the working directory, and what it copies."""
        if (inside := self._options.image_directory) is not None:
            return {"copy_command": sandboxes.make_image_copy(inside), "copied_from": f"image_directory = {inside!r}"}
        if directory is None:
            return {}
        command = [*_COPY_WORDS, f"{directory}/.", sandboxes.directories[0]]
        return {"copy_command": command, "copied_from": f"directory = {directory!r}"}

    def _read_outcome(self, outcome: EpisodeOutcome) -> float | None:
        """Return the reward; raises PolicyFailure for stages that failed, and EnvFault for those that did not start.

        What a program leaves can make its judge fail, or be killed by a limit, so that is the policy's failure too.
        """
        for stage in outcome.full_disks:
            _warn_of_full_disk(self._options.command, stage, self._options.max_disk_mb)
        if outcome.fault:
            why = f"{self._name}: {outcome.fault}"
            if not (outcome.was_ended or outcome.was_late):
                raise EnvFault(why)
            of_program = OUTCOME_TIMEOUT if outcome.was_late else OUTCOME_EXIT
            raise PolicyFailure(OUTCOME_REWARD_ERROR if outcome.results else of_program, why)
        program, *judged = (ProgramResult(**result) for result in outcome.results)
        is_hidden = self._options.sandbox != "none"
        self.problem = _describe_end(program, "program", advice=_HIDDEN_FILE.format("readable") if is_hidden else "")
        if not judged:
            if self.problem:
                raise PolicyFailure(OUTCOME_EXIT, self.problem)
            return find_reward(program.output)
        (judge,) = judged
        if self._options.judge_reward == "exit-code" and judge.was_started:
            return float(judge.exit_code == 0)
        advice = _HIDDEN_FILE.format("judge_readable") if is_hidden else ""
        if problem := _describe_end(judge, "judge", advice=advice):
            raise PolicyFailure(OUTCOME_REWARD_ERROR, problem) if judge.was_started else EnvFault(problem)
        last_line = judge.output.strip().rpartition("\n")[2]
        if (reward := find_reward(last_line)) is None:
            why = f"the last line of the judge is {last_line[-100:]!r}: it must be the reward, a number"
            raise PolicyFailure(OUTCOME_REWARD_ERROR, why)
        return reward

    def _check_readable(self) -> None:
        """Raise EnvFault for a path that this node does not have, or that is a link to what the program can read."""
        for option, path in self._list_given_paths():
            if not Path(path).exists():
                raise EnvFault(f"{option} has {path!r}, which is not on this node")
        if problem := self._find_judge_problem():
            raise EnvFault(problem)

    def _list_given_paths(self) -> list[tuple[str, str]]:
        """Return the paths that sandboxes show besides their own, each with the option that names it."""
        given = {"readable": self._options.readable, "judge_readable": self._options.judge_readable}
        return [(option, path) for option, paths in given.items() for path in paths]

    def _find_judge_problem(self) -> str:
        """Return which file of the judge the program can read too, links followed; "" if it can read none."""
        if not self._options.judge_readable:
            return ""
        in_image = _list_image_paths(self._options.readable)
        shown = [
            (path, _list_names(path))
            for path in (in_image if self._is_in_image else list_shown_paths(*self._options.readable))
        ]
        for path in self._options.judge_readable:
            for place, places in shown:
                if any(name.is_relative_to(above) for name in _list_names(path) for above in places):
                    return (
                        f"judge_readable has {path!r}, which the program can read too, as part of {place!r}: "
                        "move it elsewhere"
                    )
        return ""

    def _find_directory_problem(self, directory: str) -> str:
        if not Path(directory).is_dir():
            return f"directory = {directory!r}: no such directory"
        return self._find_copied_secret(directory)

    def _find_copied_secret(self, directory: str) -> str:
        """Return which file of the judge the program would get with its copy of a directory; "" if it gets none.

        The directory may be a part of what the judge can read: what the judge reads beside it is not copied.
        """
        for path in self._options.judge_readable:
            if any(name.is_relative_to(above) for name in _list_names(path) for above in _list_names(directory)):
                return (
                    f"judge_readable has {path!r}, which the program is given too, with its copy of directory = "
                    f"{directory!r}: move it elsewhere"
                )
        return ""

    @property
    def _name(self) -> str:
        return _describe_command(self._options.command)


class _SandboxFactory:
    """The settings that the sandboxes of one episode share."""

    def __init__(self, *, kind: SandboxKind, image: str | None, root: Path, workdir: str) -> None:
        self.kind = kind
        self._workdir = workdir
        """The place of the working directory in the sandboxes."""
        self.root = root
        self.has_fixed_disks = kind == "bubblewrap" and not find_disk_problem()
        self.counts_tasks = kind == "bubblewrap" and not find_task_problem()
        self.directories = [str(root / "program" / "work")]
        self._image = image
        _warn_of_limits(kind)

    def task_variables(self, task: str) -> dict[str, str]:
        """Return the variables with the task, if it is not too long, and with the program's directory."""
        workdir = self.directories[0] if self.kind == "none" else self._workdir
        return {"HPCRL_WORKDIR": workdir, **({"HPCRL_TASK": task} if len(task) < MAX_VARIABLE_CHARS else {})}

    def module_variables(self) -> dict[str, str]:
        """Return what the modules of hpcrl need in an image, which shows them, beside its Python."""
        return {"PYTHONPATH": str(_ROOT)} if self.kind == "apptainer" else {}

    def make_image_copy(self, directory: str) -> list[str]:
        """Return the command that copies a directory of the image to the working directory."""
        spec = SandboxSpec(
            kind=self.kind,
            workdir=INSIDE_WORKDIR,
            writable=((self.directories[0], INSIDE_WORKDIR),),
            image=self._image,
        )
        return wrap_command([*_COPY_WORDS, f"{directory}/.", INSIDE_WORKDIR], spec)

    def resolve_python(self, command: Sequence[str]) -> list[str]:
        """Return the command with the interpreter that `python` stands for."""
        ours = "python3" if self.kind == "apptainer" else sys.executable
        return [ours if command[0] == "python" else command[0], *command[1:]]

    def make_stage(
        self,
        name: str,
        launch: ProgramLaunch,
        *,
        readable: tuple[str, ...],
        environment: dict[str, str],
        timeout_s: float,
        timeout_name: str,
    ) -> Stage:
        """Make the stage `name`, with separate directories beside the working directory.

        The program starts in the working directory. A judge does not: what the program left there must not be what
        Python imports.
        """
        work, own = self.directories[0], self.root / name
        home, temporary, memory = (str(own / part) for part in ("home", "tmp", "shm"))
        self.directories += [home, temporary, memory]
        places = ((work, self._workdir), (home, INSIDE_HOME), (temporary, "/tmp"), (memory, "/dev/shm"))
        start_code = _START_CODE.format(root=str(_ROOT), module="program_launcher")
        launcher = self.resolve_python(["python", "-I", "-S", "-c", start_code])
        directories = {"HOME": home, "TMPDIR": temporary} if self.kind == "none" else {"HOME": INSIDE_HOME}
        launch = replace(launch, environment={"PYTHONUNBUFFERED": "1", **launch.environment, **directories})
        readable = _list_image_paths(readable) if self.kind == "apptainer" else list_readable_paths(*readable)
        if self.kind == "apptainer":  # which makes no place to mount in what is bound
            within = [path for path in readable if path.startswith("/tmp/") and Path(path).is_dir()]
            self.directories += [f"{temporary}{path.removeprefix('/tmp')}" for path in within]
        shown = readable if self.kind == "apptainer" else (*SYSTEM_DIRS, *readable)
        spec = SandboxSpec(
            kind=self.kind,
            workdir=self._workdir if name == "program" else INSIDE_HOME,
            writable=places,
            readable=readable,
            hidden=list_answer_files(shown) if name == "program" else (),
            image=self._image,
            is_first=True,
        )
        return Stage(
            name=name,
            command=wrap_command(launcher, spec),
            launch=asdict(launch),
            environment=environment,
            cwd=work if name == "program" else home,
            timeout_s=timeout_s,
            timeout_name=timeout_name,
        )


def find_reward(output: str) -> float | None:
    """Find the reward in the last line that is not empty, a number or an object with one; None if there is none.

    No earlier line counts: a program may print what the model wrote, which would be a reward that the model chose.
    """
    line = output.strip().rpartition("\n")[2].strip()
    if line.lower().lstrip("+-") in ("inf", "infinity", "nan"):  # as Python prints them
        raise PolicyFailure(OUTCOME_REWARD_ERROR, f"the reported reward is {line}: it must be a finite number")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_named = isinstance(value, dict) and "reward" in value
    reward = value["reward"] if is_named else value
    if isinstance(reward, int | float) and not isinstance(reward, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(reward):
                return float(reward)
    elif not is_named:
        return None
    shown = json.dumps(reward)
    raise PolicyFailure(OUTCOME_REWARD_ERROR, f"the reported reward is {shown:.100}: it must be a finite number")


def _describe_command(command: Sequence[str]) -> str:
    return " ".join(" ".join(command).split())[:120]


def _describe_end(result: ProgramResult, name: str, *, advice: str) -> str:
    """Return how a stage failed, with advice if it missed a file by its whole path; "" if it did not fail."""
    if result.exit_code == 0:
        return ""
    errors = _cut_start(" ".join(result.errors.split()))
    missed = _MISSED_FILE.search(errors)
    return f"the {name} {describe_end(result.exit_code)}{errors and f': {errors}'}{advice if missed else ''}"


def _cut_start(text: str) -> str:
    """Return the end of a long text, from a whole word on: the reason of an error is its last line."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    end = text[-MAX_ERROR_CHARS:]
    return f"... {end.partition(' ')[2] or end}"


@cache
def _warn_of_full_disk(command: tuple[str, ...], stage: str, max_disk_mb: int) -> None:
    """Report once for each command that its disk was filled: it may have ended well all the same."""
    _log.warning(
        "%s: the %s filled its disk: max_disk_mb = %d (reported once)", _describe_command(command), stage, max_disk_mb
    )


@cache
def _warn_of_leftovers(directory: Path, problem: str) -> None:
    """Report once for each reason that files of an episode could not be removed: its result stays as it is."""
    _log.warning("%s/hpcrl-agent-*: files of ended episodes cannot be removed: %s (reported once)", directory, problem)


@cache
def _warn_of_limits(kind: SandboxKind) -> None:
    """Report once which limits of this kind of sandbox are watched and not enforced by the kernel."""
    if kind == "bubblewrap":
        problems = {"max_disk_mb": find_disk_problem(), "max_processes": find_task_problem()}
    else:
        problems = dict.fromkeys(("max_disk_mb", "max_processes"), f'sandbox = "{kind}"')
    for name, problem in problems.items():
        if problem:
            _log.warning("%s is watched and not enforced by the kernel on this node: %s", name, problem)


def _build_environment(kind: SandboxKind, *, judges: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of a launcher: ours without a sandbox, but only these judges of it; else what it needs."""
    ours = keep_judges(os.environ, judges)
    if kind == "apptainer":  # which passes nothing on but what these prefixes ask for: inside, it is the image's
        return {name: value for name, value in ours.items() if not name.startswith(_PASSED_PREFIXES)}
    known = ours if kind == "none" else {name: ours[name] for name in INHERITED_VARIABLES if name in ours}
    path = os.pathsep.join([str(Path(sys.executable).parent), known.get("PATH", os.defpath)])
    return {**known, "PATH": path}


def _list_image_paths(readable: Sequence[str]) -> tuple[str, ...]:
    """Return the paths to show in an image, which has its own Python: hpcrl's launcher, and those given."""
    return tuple(dict.fromkeys([str(_ROOT / "hpcrl"), *readable]))


def _list_names(path: str) -> tuple[Path, Path]:
    """Return a path as it is given, and as it is with all links followed."""
    return Path(os.path.abspath(path)), Path(os.path.realpath(path))  # noqa: PTH100 - without "..", which Path keeps


def _remove_tree(root: Path) -> None:
    """Remove a directory, however deep it is, with folders that a program made unreadable; what is left is reported."""
    try:
        if _run_silently("rm", "-rf", "--", str(root)):
            _run_silently("chmod", "-R", "u+rwX", "--", str(root))
            if problem := _run_silently("rm", "-rf", "--", str(root)):
                _warn_of_leftovers(root.parent, problem.rpartition(": ")[2])
    except OSError as error:
        _warn_of_leftovers(root.parent, str(error))


def _run_silently(*command: str) -> str:
    """Run a command and return why it failed; "" if it did not."""
    done = subprocess.run(command, capture_output=True, errors="replace", check=False)
    return done.stderr.strip() or f"code {done.returncode}" if done.returncode else ""


async def _end_supervisor(process: asyncio.subprocess.Process) -> None:
    """End the supervisor, which ends the program and all that it started; it leads a separate session."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(SUPERVISOR_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
