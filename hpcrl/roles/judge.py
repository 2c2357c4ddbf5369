"""Role judge: serve a judge's engine, a second model whose weights never change, until the job ends.

run              serve until the job ends
open_judge_api   the engine that the judge's table names, ready to answer
make_judge_launch   the options of a judge's vLLM server
OpenedApi        an API, and how its failure is seen
MODEL_TIMEOUT_S  the time that worker 0 may take to make a tiny model
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcrl.campaign_dir import endpoints
from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.config.recipe import JUDGE_ROLE_PREFIX, JudgeConfig
from hpcrl.errors import EngineError
from hpcrl.roles.context import ROLE_ROUND_INTERVAL_S, WorkerContext
from hpcrl.rollout.judges.server import EngineApi, ModelApi, VllmApi, serve_judge
from hpcrl.system import network
from hpcrl.system.files import make_private_dir
from hpcrl.system.garbage import pause_collection
from hpcrl.system.pulse import expect_work, note_work

if TYPE_CHECKING:
    from hpcrl.engines.vllm.server import VllmLaunch

MODEL_TIMEOUT_S = 300.0


class OpenedApi(NamedTuple):
    """An API, and how its failure is seen."""

    api: ModelApi
    wait_until_failed: Callable[[], Awaitable[None]]


def run(context: WorkerContext) -> None:
    """Serve until the job ends."""
    asyncio.run(_serve(context))


async def _serve(context: WorkerContext) -> None:
    name = context.role.removeprefix(JUDGE_ROLE_PREFIX)
    judge, place = context.recipe.judge[name], context.campaign.judge(name)
    host, token = context.find_address(), endpoints.make_token()
    model_dir = await _find_model(context, judge, place.model)
    async with (
        open_judge_api(context, name, judge, model_dir) as opened,
        serve_judge(opened.api, host=host, token=token, certificate=context.certificate) as url,
    ):
        endpoint = EngineEndpoint(
            role=context.role,
            worker=context.name,
            node=network.current_node(),
            url=url,
            token=token,
            job=context.job.number,
        )
        endpoints.announce_endpoint(make_private_dir(place.endpoints), endpoint)
        expect_work("stood in one turn of its loop", context.stall_s)
        try:
            await _wait_until_ending(context, opened)
        finally:
            endpoints.withdraw_endpoint(place.endpoints, context.name)


async def _wait_until_ending(context: WorkerContext, opened: OpenedApi) -> None:
    """Wait until the job ends. If the engine fails, raise the cause: the worker is then restarted."""
    failed = asyncio.ensure_future(opened.wait_until_failed())
    while not context.draining:
        if failed.done():
            failed.result()
        note_work()
        await asyncio.sleep(ROLE_ROUND_INTERVAL_S)
    failed.cancel()


async def _find_model(context: WorkerContext, judge: JudgeConfig, directory: Path) -> Path:
    """Return the judge's model directory; worker 0 makes that of a tiny model, and the others wait for it."""
    if judge.path is not None:
        return Path(judge.path)
    assert judge.tiny is not None  # make_recipe checks it
    if context.index == 0 and not directory.exists():
        with pause_collection():
            from hpcrl.models.tiny import make_tiny_model  # imports torch, which a vLLM server's worker does not need

        make_private_dir(directory.parent)
        make_tiny_model(directory, judge.tiny, seed=context.recipe.seed)
    deadline = time.monotonic() + MODEL_TIMEOUT_S
    while not directory.exists():
        if time.monotonic() > deadline:
            raise EngineError(f"{directory} was not made in {MODEL_TIMEOUT_S:g} s: see the log of worker 0")
        await asyncio.sleep(ROLE_ROUND_INTERVAL_S)
    return directory


@contextlib.asynccontextmanager
async def open_judge_api(
    context: WorkerContext, name: str, judge: JudgeConfig, model_dir: Path
) -> AsyncIterator[OpenedApi]:
    """Open the engine that the judge's table names; only the packages of that engine are imported."""
    match judge.engine.backend:
        case "vllm":
            from hpcrl.engines.vllm.server import VllmServer

            async with VllmServer(make_judge_launch(context, name, judge, model_dir)) as server:
                yield OpenedApi(VllmApi(server), server.wait_until_failed)
        case "embedded":
            with pause_collection():
                from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model

            model = await asyncio.to_thread(load_model, model_dir)
            async with (
                EmbeddedEngine(model, store=None, max_batch=judge.engine.max_batch) as embedded,
                EngineApi(embedded, name=name, judge=judge, model_dir=model_dir) as api,
            ):
                yield OpenedApi(api, embedded.wait_until_failed)
        case "sim":
            from hpcrl.engines.sim.engine import make_sim_engine

            gpu, num_gpus = context.choose_simulated_gpu(judge.engine), context.role_plan.gpus_per_worker
            simulated = make_sim_engine(model_dir, judge.engine, gpu=gpu, num_gpus=num_gpus)
            async with simulated, EngineApi(simulated, name=name, judge=judge, model_dir=model_dir) as api:
                yield OpenedApi(api, simulated.wait_until_failed)


def make_judge_launch(context: WorkerContext, name: str, judge: JudgeConfig, model_dir: Path) -> "VllmLaunch":
    """Return the options of a judge's vLLM server."""
    from hpcrl.engines.vllm.server import VllmLaunch

    template = () if judge.chat_template is None else ("--chat-template", judge.chat_template)
    log = context.job.log(f"{context.role}-{context.index}-vllm")
    launch = VllmLaunch.from_config(judge.engine, role=context.role_plan, model=model_dir, log=log)
    return dataclasses.replace(launch, judge=name, extra_args=(*template, *launch.extra_args))
