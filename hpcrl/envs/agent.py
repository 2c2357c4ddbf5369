"""An agent program as an environment: any command that calls a model by OpenAI's API and reports its reward.

    AgentProgram    run the command once for each episode, in a sandbox
    find_reward     find the reward in the output of a program
    INSIDE_PORT, MAX_VARIABLE_CHARS, END_GRACE_S, INHERITED_VARIABLES  constants

The program finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment, and its task as one JSON object
on standard input and in HPCRL_TASK: `seed`, the option `task`, and the fields of a row if the domain has `tasks`. Its
reward is the last line that it prints, as a number or as {"reward": number}, or what it posts to
$OPENAI_BASE_URL/hpcrl/reward.
"""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from hpcrl.envs.base import ModelAccess, TaskFields
from hpcrl.envs.isolation.program_launcher import ProgramLaunch, ProgramResult
from hpcrl.envs.isolation.sandbox import (
    SandboxChoice,
    SandboxKind,
    SandboxSpec,
    choose_sandbox,
    list_readable_paths,
    wrap_command,
)
from hpcrl.errors import ConfigError, EnvFault

INSIDE_PORT = 8000
"""The port of the model on the loopback of a sandbox, which is private to it."""
MAX_VARIABLE_CHARS = 100_000
"""A longer task is only on standard input: Linux allows no variable of more than 128 KiB."""
END_GRACE_S = 5.0
"""The time limit of a launcher for ending all that it started."""
INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
"""The only variables that a program in a sandbox inherits."""
_LAUNCHER_CODE = (
    "import sys; sys.path.insert(0, {root!r}); from hpcrl.envs.isolation.program_launcher import main; sys.exit(main())"
)


class AgentProgram:
    """An environment that runs `command` for each episode.

    command       a list; `python` is the one that runs hpcrl
    task          added to the task, beside the seed
    environment   variables to set
    sandbox       auto (apptainer if there is an image, else bubblewrap), apptainer, bubblewrap, or none
    image         the image for apptainer
    readable      paths that the program may read in the sandbox, such as that of its code
    timeout_s     for the whole program
    memory_gib, cpu_s, file_gib    limits of each of its processes: data, CPU time, size of a file
    sampling      recipe: temperature and the like are the recipe's, so that every turn can be trained on; program: as
                  the program requests, and turns sampled differently from the recipe are not trained on
    trains        longest or last: which of its conversations is trained on, if there are several
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        task: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        sandbox: SandboxChoice = "auto",
        image: str | None = None,
        readable: Sequence[str] = (),
        timeout_s: float = 600.0,
        memory_gib: float = 4.0,
        cpu_s: int = 3600,
        file_gib: float = 4.0,
        sampling: Literal["recipe", "program"] = "recipe",
        trains: Literal["longest", "last"] = "longest",
    ) -> None:
        if isinstance(command, str) or not command:
            raise ConfigError(f"AgentProgram: command = {command!r}: give a list, such as ['python', 'agent.py']")
        for name, value, known in (
            ("sandbox", sandbox, ("auto", "apptainer", "bubblewrap", "none")),
            ("sampling", sampling, ("recipe", "program")),
            ("trains", trains, ("longest", "last")),
        ):
            if value not in known:
                raise ConfigError(f"AgentProgram: {name} = {value!r}: it must be one of {', '.join(known)}")
        if min(timeout_s, memory_gib, cpu_s, file_gib) <= 0:
            raise ConfigError("AgentProgram: timeout_s, memory_gib, cpu_s and file_gib must be above 0")
        self.sampling = sampling
        self.trains = trains
        self._command = [sys.executable if part == "python" else part for part in command[:1]] + list(command[1:])
        self._task = task or {}
        self._environment = environment or {}
        self._sandbox: SandboxChoice = sandbox
        self._image = image
        self._readable = tuple(readable)
        self._timeout_s = timeout_s
        self._limits = {
            "memory_bytes": int(memory_gib * 2**30),
            "cpu_s": int(cpu_s),
            "file_bytes": int(file_gib * 2**30),
        }

    async def run(self, seed: int, access: ModelAccess, task: TaskFields | None = None) -> float | None:
        """Run the program and return its reward, or None if it printed none; raises EnvFault if it fails."""
        kind = await asyncio.to_thread(choose_sandbox, self._sandbox, image=self._image)
        workdir = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="hpcrl-agent-"))
        try:
            launch = self._make_launch({"seed": seed, **self._task, **(task or {})}, access, kind=kind, workdir=workdir)
            result = await self._run_launcher(launch, access, kind=kind, workdir=workdir)
        finally:
            await asyncio.to_thread(shutil.rmtree, workdir, ignore_errors=True)
        return _read_reward(result)

    def _make_launch(
        self, fields: TaskFields, access: ModelAccess, *, kind: SandboxKind, workdir: Path
    ) -> ProgramLaunch:
        task = json.dumps(fields)
        in_variable = {"HPCRL_TASK": task} if len(task) < MAX_VARIABLE_CHARS else {}
        url = access.url if kind == "none" else f"http://127.0.0.1:{INSIDE_PORT}/v1"
        model = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": access.api_key, "OPENAI_MODEL": access.model}
        return ProgramLaunch(
            command=self._command,
            task=task,
            environment={**_build_environment(kind, workdir), **self._environment, **model, **in_variable},
            forward_port=0 if kind == "none" else INSIDE_PORT,
            socket=access.socket,
            **self._limits,
        )

    async def _run_launcher(
        self, launch: ProgramLaunch, access: ModelAccess, *, kind: SandboxKind, workdir: Path
    ) -> ProgramResult:
        seen = list_readable_paths(str(Path(access.socket).parent), *self._readable)
        spec = SandboxSpec(kind=kind, workdir=str(workdir), readable=seen, image=self._image)
        root = str(Path(__file__).resolve().parents[2])
        process = await asyncio.create_subprocess_exec(
            *wrap_command([sys.executable, "-I", "-S", "-c", _LAUNCHER_CODE.format(root=root)], spec),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_build_environment(kind, workdir),
            cwd=workdir,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                output, errors = await process.communicate(json.dumps(asdict(launch)).encode())
        except TimeoutError:
            raise EnvFault(f"{self._name}: still running after timeout_s = {self._timeout_s:g} s") from None
        finally:
            await _end_launcher(process)
        try:
            return ProgramResult(**json.loads(output))
        except (ValueError, TypeError):
            why = errors.decode(errors="replace").strip()[-300:]
            raise EnvFault(f"{self._name}: its sandbox ({kind}) ended with {process.returncode}: {why}") from None

    @property
    def _name(self) -> str:
        return " ".join(self._command)[:120]


def find_reward(output: str) -> float | None:
    """Find the reward in the last line that has one: a finite number, or an object with one; None if there is none."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            value = json.loads(line)
            reward = value["reward"] if isinstance(value, dict) else value
            if isinstance(reward, bool) or not isinstance(reward, int | float):
                continue
            if not math.isfinite(reward):
                raise EnvFault(f"the program reported the reward {reward}: it must be a finite number")
            return float(reward)
    return None


def _read_reward(result: ProgramResult) -> float | None:
    """Return the reward; raises EnvFault for a program that failed, even if it printed one."""
    if result.exit_code != 0:
        how = f"ended with code {result.exit_code}" if result.exit_code > 0 else _describe_signal(-result.exit_code)
        raise EnvFault(f"the program {how}: {result.errors.strip()[-300:]}")
    return find_reward(result.output)


def _describe_signal(number: int) -> str:
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"


def _build_environment(kind: SandboxKind, workdir: Path) -> dict[str, str]:
    """Return the program's environment: all of ours without a sandbox, else only what it needs."""
    known = (
        os.environ if kind == "none" else {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), known.get("PATH", os.defpath)])
    return {**known, "PATH": path, "HOME": str(workdir), "TMPDIR": str(workdir), "PYTHONUNBUFFERED": "1"}


async def _end_launcher(process: asyncio.subprocess.Process) -> None:
    """End the launcher, which ends the program and all that it started; it leads a separate session."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_GRACE_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
