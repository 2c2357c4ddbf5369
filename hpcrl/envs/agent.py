"""An agent program as an environment: any command that talks to a model by OpenAI's API and says what it earned.

    AgentProgram    runs the command once for each episode, in a sandbox
    reward_in       the reward in what a program printed

The program finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment, and its task as one JSON object
on standard input and in HPCRL_TASK. Its reward is the last line that it prints, as a number or as {"reward": number},
or what it posts to $OPENAI_BASE_URL/hpcrl/reward.
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

from hpcrl.envs.base import ModelDoor
from hpcrl.envs.isolation.program_launcher import Landing, Launch
from hpcrl.envs.isolation.sandbox import Kind, Walls, Wanted, choose, readable, walled
from hpcrl.errors import ConfigError, EnvFault

INSIDE_PORT = 8000
"""Where the model is on the loopback of a sandbox, which nobody else shares."""
END_S = 5.0
"""How long a program's launcher may take to end all that it started."""
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
"""All that a program in a sandbox is told of our environment."""
_LAUNCH = (
    "import sys; sys.path.insert(0, {root!r}); from hpcrl.envs.isolation.program_launcher import main; sys.exit(main())"
)


class AgentProgram:
    """Runs `command` for each episode.

    command       a list; `python` is the one that runs hpcrl
    task          put into the task, beside the seed
    environment   variables to set
    sandbox       auto (apptainer if there is an image, else bubblewrap), apptainer, bubblewrap, or none
    image         of apptainer
    readable      paths that the program may read in the sandbox, such as that of its own code
    timeout_s     for the whole program
    memory_gib, cpu_s, file_gib    limits of each of its processes: data, CPU time, size of a file
    sampling      recipe: temperature and the like are the recipe's, so that every turn can be trained on; program: as
                  it asks, and turns sampled otherwise are not trained on
    trains        longest or last: which of its conversations is trained, if there are several
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        task: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        sandbox: Wanted = "auto",
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
                raise ConfigError(f"AgentProgram: {name} = {value!r}: it is one of {', '.join(known)}")
        if min(timeout_s, memory_gib, cpu_s, file_gib) <= 0:
            raise ConfigError("AgentProgram: timeout_s, memory_gib, cpu_s and file_gib are above 0")
        self.sampling = sampling
        self.trains = trains
        self._command = [sys.executable if part == "python" else part for part in command[:1]] + list(command[1:])
        self._task = task or {}
        self._environment = environment or {}
        self._sandbox: Wanted = sandbox
        self._image = image
        self._readable = tuple(readable)
        self._timeout_s = timeout_s
        self._limits = {
            "memory_bytes": int(memory_gib * 2**30),
            "cpu_s": int(cpu_s),
            "file_bytes": int(file_gib * 2**30),
        }

    async def run(self, seed: int, door: ModelDoor) -> float | None:
        """One run of the program; EnvFault if it fails or says nothing of a reward."""
        kind = await asyncio.to_thread(choose, self._sandbox, image=self._image)
        workdir = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="hpcrl-agent-"))
        try:
            launch = self._launch(seed, door, kind=kind, workdir=workdir)
            landing = await self._landed(launch, door, kind=kind, workdir=workdir)
        finally:
            await asyncio.to_thread(shutil.rmtree, workdir, ignore_errors=True)
        return _judged(landing)

    def _launch(self, seed: int, door: ModelDoor, *, kind: Kind, workdir: Path) -> Launch:
        task = json.dumps({"seed": seed, **self._task})
        url = door.url if kind == "none" else f"http://127.0.0.1:{INSIDE_PORT}/v1"
        model = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": door.api_key, "OPENAI_MODEL": door.model}
        return Launch(
            command=self._command,
            task=task,
            environment={**_environment(kind, workdir), **self._environment, **model, "HPCRL_TASK": task},
            forward_port=0 if kind == "none" else INSIDE_PORT,
            socket=door.socket,
            **self._limits,
        )

    async def _landed(self, launch: Launch, door: ModelDoor, *, kind: Kind, workdir: Path) -> Landing:
        seen = readable(str(Path(door.socket).parent), *self._readable)
        walls = Walls(kind=kind, workdir=str(workdir), readable=seen, image=self._image)
        root = str(Path(__file__).resolve().parents[2])
        process = await asyncio.create_subprocess_exec(
            *walled([sys.executable, "-I", "-S", "-c", _LAUNCH.format(root=root)], walls),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(kind, workdir),
            cwd=workdir,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                said, errors = await process.communicate(json.dumps(asdict(launch)).encode())
        except TimeoutError:
            raise EnvFault(f"{self._name}: no end in timeout_s = {self._timeout_s:g} s") from None
        finally:
            await _end(process)
        try:
            return Landing(**json.loads(said))
        except (ValueError, TypeError):
            why = errors.decode(errors="replace").strip()[-300:]
            raise EnvFault(f"{self._name}: its sandbox ({kind}) ended with {process.returncode}: {why}") from None

    @property
    def _name(self) -> str:
        return " ".join(self._command)[:120]


def reward_in(output: str) -> float | None:
    """The reward in the last line that is one: a finite number, or an object with one; None if there is none."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            said = json.loads(line)
            reward = said["reward"] if isinstance(said, dict) else said
            if isinstance(reward, bool) or not isinstance(reward, int | float):
                continue
            if not math.isfinite(reward):
                raise EnvFault(f"the program gave the reward {reward}: a finite number is needed")
            return float(reward)
    return None


def _judged(landing: Landing) -> float | None:
    """The reward; a program that failed gets none, whatever it printed before."""
    if landing.exit_code != 0:
        how = f"ended with code {landing.exit_code}" if landing.exit_code > 0 else _killed(-landing.exit_code)
        raise EnvFault(f"the program {how}: {landing.errors.strip()[-300:]}")
    return reward_in(landing.output)


def _killed(number: int) -> str:
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"


def _environment(kind: Kind, workdir: Path) -> dict[str, str]:
    """Without walls a program is one of ours and inherits all; inside it is told what it needs."""
    known = os.environ if kind == "none" else {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = os.pathsep.join([str(Path(sys.executable).parent), known.get("PATH", os.defpath)])
    return {**known, "PATH": path, "HOME": str(workdir), "TMPDIR": str(workdir), "PYTHONUNBUFFERED": "1"}


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the launcher, which ends the program and all that it started; it leads a session of its own."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
