"""Play episodes of a verifiers environment for an env worker: `python -P verifiers_server.py`.

It imports nothing of hpcrl. Requests and answers are lines of JSON on standard input and output:

    {"config": ...}                            the environment's configuration, once; answered {"num_tasks": number}
    {"run": id, "task": number, "url", "key", "model"}   answered {"run": id, "reward": number}, or with an "error";
                                               "by_policy": true with one that its agents caused alone
    {"cancel": id}                             ends a run; not answered

The task set is loaded once. A closed standard input ends the process.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes.base import Runtime

SendAnswer = Callable[[dict[str, Any]], object]
MAX_ENDLESS_TASKS = 1000
"""The tasks that are used of a task set without end."""
_EXIT_PATTERN = re.compile(r"\bexited -?\d+: ")


class AgentError(Exception):
    """The agents of an episode failed by themselves, after what the model answered or was asked."""


async def prepare_local_script(
    self: Runtime, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
) -> list[str]:
    """Return the command that runs a harness's script with this interpreter: a node has neither uv nor a network."""
    data = script.encode() if isinstance(script, str) else script
    path = Path(self.scripts_dir).expanduser() / f"{hashlib.sha256(data).hexdigest()}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.rename(path)
    return [sys.executable, "-P", str(path)]


async def play_task(env: vf.Env, task: vf.Task, request: dict[str, Any]) -> float:
    """Play one episode; return its reward, or raise what went wrong in it."""
    variable = f"HPCRL_API_KEY_{request['run']}"  # verifiers hides variables with API_KEY from the agent
    os.environ[variable] = request["key"]
    try:
        client = vf.EvalClientConfig(base_url=request["url"], api_key_var=variable)
        episode = await env.run_episode(task, vf.ModelContext(model=request["model"], client=client))
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        why = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed"
        raise AgentError(why) if is_agent_failure(episode.traces) else RuntimeError(why)
    return float(sum(trace.reward for trace in episode.traces) / len(episode.traces))


def is_agent_failure(traces: Sequence[vf.Trace]) -> bool:
    """Return whether agents failed, and each by a refused call of the model or a program that exited with an error."""
    failed = [trace for trace in traces if trace.errors]
    by_itself = (not trace.timing.finalize.start and all(map(_is_caused_by_agent, trace.errors)) for trace in failed)
    return bool(failed) and all(by_itself)


def _is_caused_by_agent(error: Any) -> bool:
    """Return whether an error is of the kinds that only what an agent does leads to, not machines or task code."""
    if error.type == "ProviderError":
        return error.status_code is not None and 400 <= error.status_code < 500 and error.status_code not in (408, 429)
    return error.type == "HarnessError" and bool(_EXIT_PATTERN.search(error.message))


async def answer_run(env: vf.Env, tasks: Sequence[vf.Task], request: dict[str, Any], send: SendAnswer) -> None:
    """Play the task of a request, and answer with its reward or what went wrong."""
    try:
        reward = await play_task(env, tasks[request["task"] % len(tasks)], request)
        send({"run": request["run"], "reward": reward})
    except Exception as error:  # noqa: BLE001 - the answer reports it
        by_policy = {"by_policy": True} if isinstance(error, AgentError) else {}
        send({"run": request["run"], "error": f"{type(error).__name__}: {error}"[:2000], **by_policy})


async def serve_requests(lines: asyncio.StreamReader, send: SendAnswer) -> None:
    """Load the task set, then play what is requested until the input ends."""
    config = json.loads(await lines.readline())["config"]
    try:
        env = vf.load_environment(vf.resolve_env_config(config))
        tasks = list(env.taskset if env.taskset.bounded else itertools.islice(env.taskset, MAX_ENDLESS_TASKS))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the answer reports it
        send({"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    runs: dict[int, asyncio.Task[None]] = {}
    async with env.serving():
        send({"num_tasks": len(tasks)})
        while line := await lines.readline():
            request = json.loads(line)
            if "cancel" in request:
                if (run := runs.get(request["cancel"])) is not None:
                    run.cancel()
                continue
            run = asyncio.create_task(answer_run(env, tasks, request, send))
            runs[request["run"]] = run
            run.add_done_callback(partial(_forget_run, runs, request["run"]))
        for run in runs.values():
            run.cancel()
        await asyncio.gather(*runs.values(), return_exceptions=True)


def _forget_run(runs: "dict[int, asyncio.Task[None]]", run: int, _: "asyncio.Task[None]") -> None:
    del runs[run]


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the environment prints must not reach the answers
    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    Runtime.prepare_uv_script = prepare_local_script
    with contextlib.suppress(BrokenPipeError):
        await serve_requests(lines, lambda answer: answers.write(json.dumps(answer) + "\n"))


if __name__ == "__main__":
    asyncio.run(main())
