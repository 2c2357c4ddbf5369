"""Check that the user code and packages of a recipe can be used here: `python -m hpcrl.envs.check < recipe.json`.

    main            check everything
    check_packages  check the optional packages

It is a separate process, so that the login-node side stays light and broken user code breaks only this. Its standard
output has only the message of the refusal; output of user code goes to standard error.
"""

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import msgspec

from hpcrl.config.recipe import VLLM_PARSER_PREFIX, DomainConfig, PipelineNode, Recipe
from hpcrl.config.user_code import load_code
from hpcrl.envs.base import check_task_parameter, construct_env
from hpcrl.envs.pool import start_process
from hpcrl.errors import ConfigError, EnvFault


def main() -> int:
    recipe = msgspec.json.decode(sys.stdin.buffer.read(), type=Recipe)
    answer = _take_stdout()
    try:
        for name, domain in recipe.domains.items():
            load_code(domain.reward, what=f"domains.{name}.reward")
            _check_environment(domain, what=f"domains.{name}.env")
            if more := recipe.evaluation.options.get(name):
                changed = msgspec.structs.replace(domain, options={**domain.options, **more})
                _check_environment(changed, what=f"evaluation.options.{name}")
        _check_curriculum(recipe)
        check_packages(recipe)
        _check_pipeline(recipe)
    except ConfigError as error:
        os.write(answer, str(error).encode())
        return 2
    except SystemExit as error:
        os.write(answer, f"its code ends the program with sys.exit({error.code!r}): remove that call".encode())
        return 2
    return 0


def _check_environment(domain: DomainConfig, *, what: str) -> None:
    """Make an environment, in its own interpreter if it has one, and call its `check` if it has one."""
    if domain.python is not None:
        asyncio.run(_check_elsewhere(domain, what=what))
        return
    env = construct_env(domain.env, domain.options, what=what)
    if domain.tasks is not None:
        check_task_parameter(env)
    if callable(check := getattr(env, "check", None)):
        check()


async def _check_elsewhere(domain: DomainConfig, *, what: str) -> None:
    try:
        env = await start_process(domain)
    except EnvFault as error:
        raise ConfigError(f"{what}, with python = {domain.python!r}: {error}") from error
    await env.close()


def _take_stdout() -> int:
    """Redirect standard output to standard error; returns a descriptor of the original."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answer


def _check_curriculum(recipe: Recipe) -> None:
    """Call the curriculum without rewards, since it is also called before there are any."""
    name = recipe.rollout.curriculum
    if name is None:
        return
    hook = load_code(name, what="rollout.curriculum")
    try:
        dict(hook({name: [] for name, domain in recipe.domains.items() if not domain.held_out}))
    except Exception as error:
        hint = "it is called with the recent rewards of each domain, none at first, and must return weights by domain"
        raise ConfigError(f"rollout.curriculum = {name!r}: {type(error).__name__}: {error}: {hint}") from error


def check_packages(recipe: Recipe) -> None:
    """Raise ConfigError if an optional package that the recipe needs is not installed."""
    metrics = recipe.metrics
    for package, asked in (("tensorboard", metrics.tensorboard), ("wandb", metrics.wandb != "off")):
        if asked and find_spec(package) is None:
            raise ConfigError(
                f"[metrics] needs the package {package}, which {sys.executable} does not have: "
                f"pip install 'hpcrl[{package}]' there, or remove it from [metrics]"
            )
    for setting, name in (
        ("tool_parser", recipe.engine.tool_parser),
        ("reasoning_parser", recipe.engine.reasoning_parser),
    ):
        if name.startswith(VLLM_PARSER_PREFIX) and find_spec("vllm") is None:
            raise ConfigError(
                f"engine.{setting} = {name!r} needs the package vllm, which {sys.executable} does not have: install it "
                "there, or name a family of models (docs/agents.md)"
            )
    if recipe.train.lora_rank and find_spec("peft") is None:
        raise ConfigError(
            f"train.lora_rank = {recipe.train.lora_rank} needs the package peft, which {sys.executable} does not have: "
            "pip install 'hpcrl[lora]' there, or set it to 0"
        )


def _check_pipeline(recipe: Recipe) -> None:
    for name, node in recipe.train.pipeline.items():
        what = f"train.pipeline.{name}.function"
        if node.function is None:
            continue
        function = load_code(node.function, what=what)
        if not callable(function):
            raise ConfigError(f"{what} = {node.function!r} is not a function")
        if name == "loss":
            _check_loss_signature(function, node)


def _check_loss_signature(function: Callable[..., Any], node: PipelineNode) -> None:
    """Check that a loss takes what it will be called with."""
    names = ["logprobs", "behaviour", "advantages", "mask", *node.inputs[1:]]
    try:
        inspect.signature(function).bind(*names, **node.options)
    except TypeError as error:
        given = ", ".join([*names, *(f"{option}=..." for option in node.options)])
        raise ConfigError(f"train.pipeline.loss is called as {node.function}({given}): {error}") from error
    except ValueError:  # a function of C has no signature
        return


if __name__ == "__main__":
    sys.exit(main())
