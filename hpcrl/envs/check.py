"""Check the user code and the packages that a recipe names: `python -m hpcrl.envs.check ANSWER < recipe.json`.

    main            check everything
    check_packages  check the optional packages
    MAX_CHECKED_TASKS  the tasks of a domain whose images and directories are looked for

It is a separate process, so that the login-node side stays light and broken user code breaks only this. The file ANSWER
names each piece of user code before it runs, as this may end the process; then, after an empty name, it has the message
of the refusal, or else a line for each problem that nodes may not have. It is open only while it is written, so that
user code cannot close it or write to it. The output of user code goes to standard error. A second argument is a
ProblemJudge.
"""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.pipeline import make_pipeline
from hpcrl.config.recipe import VLLM_PARSER_PREFIX, DomainConfig, EngineConfig, PipelineNode, Recipe, TrainConfig
from hpcrl.config.toml import suggest_name
from hpcrl.config.user_code import load_code
from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.base import accepts, check_signatures, construct_env
from hpcrl.envs.pool import start_process
from hpcrl.envs.program_files import SUBJECT_END, ProblemJudge
from hpcrl.envs.task_set import check_task_set
from hpcrl.errors import ConfigError, EnvFault, show_error
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_USAGE, describe_end
from hpcrl.system.package_range import MEGATRON, VLLM, find_range, find_range_problem

MAX_CHECKED_TASKS = 20_000
"""A look for one file may take half a millisecond on a large file system."""


def main() -> int:
    recipe = msgspec.json.decode(sys.stdin.buffer.read(), type=Recipe)
    judge = msgspec.json.decode(sys.argv[2], type=ProblemJudge) if len(sys.argv) > 2 else ProblemJudge()
    write, notes = partial(_write_answer, Path(sys.argv[1]), pid=os.getpid()), dict[str, None]()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        for subject, check in _list_checks(recipe, judge):
            write(subject + SUBJECT_END)
            notes |= dict.fromkeys(_run_check(subject, check))
        check_packages(recipe)
    except ConfigError as error:
        write(SUBJECT_END + str(error).replace(SUBJECT_END, " "))
        return EXIT_USAGE
    write(SUBJECT_END + "".join(f"{note}\n" for note in notes).replace(SUBJECT_END, " "))
    return EXIT_DONE


def _list_checks(recipe: Recipe, judge: ProblemJudge) -> Iterator[tuple[str, Callable[[], list[str] | None]]]:
    """Yield each piece of user code, as its key and value in the recipe, with the function that checks it."""
    for name, domain in recipe.domains.items():
        what = f"domains.{name}.reward"
        yield f"{what} = {domain.reward!r}", partial(_check_reward, domain, what=what)
        what = f"domains.{name}.env"
        yield f"{what} = {domain.env!r}", partial(_check_environment, domain, name=name, what=what, judge=judge)
        if more := recipe.evaluation.options.get(name):
            changed = msgspec.structs.replace(domain, options={**domain.options, **more})
            what = f"evaluation.options.{name}"
            yield what, partial(_check_environment, changed, name=name, what=what, judge=judge)
    if recipe.rollout.curriculum is not None:
        subject = f"rollout.curriculum = {recipe.rollout.curriculum!r}"
        yield subject, partial(_check_curriculum, recipe)
    for name, node in recipe.train.pipeline.items():
        if node.function is not None:
            subject = f"train.pipeline.{name}.function = {node.function!r}"
            yield subject, partial(_check_function, name, node, recipe.train)


def _check_reward(domain: DomainConfig, *, what: str) -> None:
    """Load a reward function and check that it can be called as it will be, with its options."""
    function = load_code(domain.reward, what=what)
    if not callable(function):
        raise ConfigError(f"{what} = {domain.reward!r} is not a function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C
        return
    _check_kind(function, f"{what} = {domain.reward!r}", result="reward")
    text = "texts" if list(parameters)[:1] == ["trajectories"] else "text"
    more = {name: None for name in ("judges", text) if name in parameters}
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    known = [name for name in list(parameters)[1:] if name not in more]
    for name in domain.reward_options:
        if name not in parameters and not takes_any:
            raise ConfigError(
                f"{what} = {domain.reward!r} has no option {name!r}: {suggest_name(name, known)}it has "
                f"{', '.join(known) or 'none'}"
            )
    if not accepts(function, None, **{**domain.reward_options, **more}):
        options = "".join(f", {name}=..." for name in domain.reward_options)
        raise ConfigError(
            f"{what} = {domain.reward!r} takes {inspect.signature(function)}, and is called with "
            f"(trajectory{options}): change it, or the domain's reward_options"
        )
    if "judges" in parameters and parameters["judges"].default is inspect.Parameter.empty and not domain.judges:
        raise ConfigError(
            f"{what} = {domain.reward!r} takes judges, and {what.removesuffix('.reward')}.judges names none: list "
            "there those that it calls"
        )


def _check_kind(function: Callable[..., Any], what: str, *, result: str) -> None:
    """Refuse what can be called, and never returns a result."""
    if inspect.isclass(function):
        raise ConfigError(
            f"{what} is a class, whose call makes an object and no {result}: name a function, or an object"
        )
    if _is_any(function, inspect.isgeneratorfunction) or _is_any(function, inspect.isasyncgenfunction):
        raise ConfigError(f"{what} is a generator, which returns no {result}: use `return` in place of `yield`")


def _is_any(function: Callable[..., Any], is_kind: Callable[[Any], bool]) -> bool:
    """Return whether a function, or the method by which an object is called, is of a kind."""
    return is_kind(function) or is_kind(type(function).__call__)


def _run_check(subject: str, check: Callable[[], list[str] | None]) -> list[str]:
    """Check a piece of user code; whatever it raises names it."""
    try:
        return check() or []
    except ConfigError:
        raise
    except SystemExit as error:
        raise ConfigError(f"{subject}: its code ends the program with sys.exit({error.code!r}): remove it") from error
    except BaseException as error:
        raise ConfigError(f"{subject}: {show_error(error)}") from error


def _write_answer(path: Path, text: str, *, pid: int) -> None:
    if os.getpid() != pid:  # a process that user code has forked, and that runs on from there
        os._exit(EXIT_DONE)
    with path.open("ab") as file:
        file.write(text.encode(errors="replace"))


def _check_environment(domain: DomainConfig, *, name: str, what: str, judge: ProblemJudge) -> list[str]:
    """Make an environment, in its own interpreter if it has one, and check its needs; return what is not certain."""
    if domain.python is not None:
        asyncio.run(_check_elsewhere(domain, what=what))
        return []
    try:
        env = construct_env(domain.env, domain.options, what=what)
        check_signatures(env, has_tasks=domain.tasks is not None)
        if callable(check := getattr(env, "check", None)):
            check()
        if callable(check_task := getattr(env, "check_task", None)):
            if domain.task_set is None:
                check_task(None)
            else:
                check_task_set(domain.task_set, domain=name, only_held_out=domain.held_out, check=check_task)
        return (
            list(_check_program_files(env, domain, name=name, what=what, judge=judge))
            if isinstance(env, AgentProgram)
            else []
        )
    except ConfigError as error:
        message = str(error)
        raise ConfigError(
            message if message.startswith(("domains.", what)) else f"domains.{name}: {message}"
        ) from error


def _check_program_files(
    env: AgentProgram, domain: DomainConfig, *, name: str, what: str, judge: ProblemJudge
) -> Iterator[str]:
    """Yield the problems of an agent program that nodes may not have; raise ConfigError for others."""
    where = f"domains.{name}.options" if what.startswith("domains.") else what
    hint = "a node may have it; if none has, every episode of this domain is a fault"
    for problem in env.find_problems():
        if judge.is_certain(problem):
            raise ConfigError(f"{where}.{problem.text}")
        yield f"{where}.{problem.text} (here; {hint})"
    if not env.names_task_files:
        return
    first_unsure, num_checked = "", 0

    def check_row(fields: dict[str, Any]) -> None:
        nonlocal first_unsure, num_checked
        num_checked += 1
        for problem in env.find_task_problems(fields) if num_checked <= MAX_CHECKED_TASKS else ():
            if judge.is_certain(problem):
                raise ConfigError(f"{where}.{problem.text}")
            first_unsure = first_unsure or problem.text

    if domain.task_set is None:
        check_row({})
    else:
        check_task_set(domain.task_set, domain=name, only_held_out=domain.held_out, check=check_row)
    if first_unsure:
        yield f"{where}.{first_unsure} (here, and perhaps for other rows; {hint})"
    if num_checked > MAX_CHECKED_TASKS:
        yield f"{where}: of {num_checked} tasks the files of the first {MAX_CHECKED_TASKS} were looked for"


async def _check_elsewhere(domain: DomainConfig, *, what: str) -> None:
    try:
        env = await start_process(domain)
    except EnvFault as error:
        text = str(error).replace(f"env = {domain.env!r}: ", "", 1)
        raise ConfigError(f"{what}, with python = {domain.python!r}: {text}") from error
    await env.close()


def _check_curriculum(recipe: Recipe) -> None:
    """Call the curriculum without rewards, since it is also called before there are any."""
    name = recipe.rollout.curriculum
    assert name is not None
    hook = load_code(name, what="rollout.curriculum")
    try:
        dict(hook({name: [] for name, domain in recipe.domains.items() if not domain.held_out}))
    except Exception as error:
        hint = "it is called with the recent rewards of each domain, none at first, and must return weights by domain"
        raise ConfigError(f"rollout.curriculum = {name!r}: {show_error(error)}: {hint}") from error


def check_packages(recipe: Recipe) -> None:
    """Raise ConfigError if an optional package that the recipe needs is not installed."""
    metrics, compression = recipe.metrics, recipe.spool.compression
    sinks = {"tensorboard": metrics.tensorboard, "wandb": metrics.wandb != "off", "mlflow": metrics.mlflow}
    for package, asked in sinks.items():
        if asked:
            _require(package, "[metrics]", requirement=f"hpcrl[{package}]", way_out="remove it from [metrics]")
    if compression != "none":
        setting = f'spool.compression = "{compression}"'
        _require("hdf5plugin", setting, requirement="hpcrl[compress]", way_out='set it to "none"')
    if recipe.train.trainer == "megatron":
        requirement = MEGATRON.package + find_range(MEGATRON)
        _require("megatron", 'train.trainer = "megatron"', requirement=requirement, way_out='set it to "torch"')
    engines = {"": recipe.engine, **{f"judge.{name}.": judge.engine for name, judge in recipe.judge.items()}}
    for prefix, engine in engines.items():
        _check_vllm_version(engine, prefix)
        _check_vllm_parsers(engine, prefix)


def _require(package: str, setting: str, *, requirement: str, way_out: str) -> None:
    """Refuse a setting if the package that it needs is not installed."""
    if find_spec(package) is None:
        raise ConfigError(
            f"{setting} needs the package {package}, which {sys.executable} does not have: "
            f"pip install '{requirement}' there, or {way_out}"
        )


def _check_vllm_version(engine: EngineConfig, prefix: str) -> None:
    """Refuse a vLLM that hpcrl is not tested with, unless the recipe wants it; `prefix` is that of its settings."""
    if engine.backend != "vllm" or engine.any_vllm_version:
        return
    problem = find_range_problem(VLLM, setting=f"{prefix}engine.any_vllm_version = true")
    if problem is not None:
        raise ConfigError(f'{prefix}engine.backend = "vllm": {problem}')


def _check_vllm_parsers(engine: EngineConfig, prefix: str) -> None:
    """Let vLLM look its parsers up, which takes seconds and half a gigabyte: in a process, and only if one is named.

    `prefix` is that of the engine's settings in the recipe.
    """
    settings = {"tool_parser": engine.tool_parser, "reasoning_parser": engine.reasoning_parser}
    of_vllm = {setting: name for setting, name in settings.items() if name.startswith(VLLM_PARSER_PREFIX)}
    if not of_vllm:
        return
    if find_spec("vllm") is None:
        setting, name = next(iter(of_vllm.items()))
        raise ConfigError(
            f"{prefix}engine.{setting} = {name!r} needs the package vllm, which {sys.executable} does not have: "
            "install it there, or name a family of models (docs/agents.md)"
        )
    command = [sys.executable, "-m", "hpcrl.engines.vllm.parsers", *settings.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == EXIT_USAGE:
        raise ConfigError(prefix + last)
    if done.returncode:
        names = ", ".join(f"{prefix}engine.{setting} = {name!r}" for setting, name in of_vllm.items())
        raise ConfigError(f"vLLM, which has the parsers of {names}, {describe_end(done.returncode)}: {last[-300:]}")


def _check_function(name: str, node: PipelineNode, train: TrainConfig) -> None:
    what = f"train.pipeline.{name}.function"
    function = load_code(node.function or "", what=what)
    if not callable(function):
        raise ConfigError(f"{what} = {node.function!r} is not a function")
    if _is_any(function, inspect.iscoroutinefunction):
        raise ConfigError(f"{what} = {node.function!r} is async, and the trainer awaits nothing: remove `async`")
    _check_kind(function, f"{what} = {node.function!r}", result="result")
    if (names := _list_arguments(name, node, train)) is not None:
        _check_signature(name, function, node, names)


def _list_arguments(name: str, node: PipelineNode, train: TrainConfig) -> list[str] | None:
    """Return what a function of the user's is called with; None where that depends on what it takes."""
    if name == "loss":
        return ["logprobs", "behaviour", "advantages", "mask", *node.inputs[1:]]
    if name == "update":
        return ["weight", "gradient", "state", "rate"]
    if name == "values" or make_pipeline(train)[name].output == "tokens":
        return ["micro_batch", *node.inputs[1:]]
    return None


def _check_signature(name: str, function: Callable[..., Any], node: PipelineNode, names: list[str]) -> None:
    """Check that a function takes what it will be called with."""
    try:
        inspect.signature(function).bind(*names, **node.options)
    except TypeError as error:
        given = ", ".join([*names, *(f"{option}=..." for option in node.options)])
        raise ConfigError(f"train.pipeline.{name} is called as {node.function}({given}): {error}") from error
    except ValueError:  # a function of C has no signature
        return


if __name__ == "__main__":
    sys.exit(main())
