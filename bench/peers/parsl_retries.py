"""The work of a campaign as apps of Parsl, whose retries are all that follows a kill: `main(DIRECTORY)`.

    play      an app: the episodes of some groups, at once; each turn asks an engine over HTTP
    serve     an app that never returns: an engine, which answers at once
    train     an app: load the last checkpoint, take the time of a training step, save the next one
    main      keep all workers busy, and train whenever a step's groups have been played

Each app leaves the id of its process in DIRECTORY/workers, and each step adds a line to DIRECTORY/steps.
Heartbeats are as short as those of hpcrl's own executors, and a task may be retried any number of times.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

NUM_ROLLOUT_WORKERS, NUM_ENGINES = 7, 2
GROUPS_PER_STEP, GROUP_SIZE = 14, 4
_GROUPS_PER_APP = GROUPS_PER_STEP // NUM_ROLLOUT_WORKERS
_NUM_RETRIES = 1_000_000
_HEARTBEAT_INTERVAL_S, _HEARTBEAT_TIMEOUT_S = 5, 20


def note_process(directory: str, role: str) -> None:
    rank = os.environ["PARSL_WORKER_RANK"]
    (Path(directory) / "workers" / f"{role}-{rank}").write_text(str(os.getpid()))


def play(seeds: Sequence[int], directory: str) -> list[int]:
    import random

    import aiohttp

    from bench.faults.slow_episodes import list_turns

    note_process(directory, "rollout")
    engines = sorted(Path(directory).glob("engine-*"))

    async def play_episode(seed: int, session: aiohttp.ClientSession) -> int:
        url = random.choice(engines).read_text()
        turns = list_turns(seed)
        for turn_s in reversed(turns):
            async with session.post(url, json={"tokens": [1, 2, 3]}) as answer:
                await answer.json()
            await asyncio.sleep(turn_s)
        return len(turns)

    async def play_all() -> list[int]:
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            return await asyncio.gather(*(play_episode(seed, session) for seed in seeds for _ in range(GROUP_SIZE)))

    return asyncio.run(play_all())


def serve(index: int, directory: str) -> None:
    from aiohttp import web

    note_process(directory, "engine")

    async def answer(request: web.Request) -> web.Response:
        await request.json()
        return web.json_response({"tokens": [1]})

    async def run() -> None:
        application = web.Application()
        application.router.add_post("/", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        path = Path(directory) / f".engine-{index}"
        path.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        path.rename(path.with_name(path.name[1:]))
        await asyncio.Event().wait()

    asyncio.run(run())


def train(step: int, results: list[list[int]], directory: str) -> int:
    import torch

    from bench.faults.slow_episodes import TRAIN_S

    note_process(directory, "train")
    path = Path(directory) / "checkpoint.pt"
    state: dict[str, Any] = torch.load(path) if path.exists() else {"step": 0, "weights": torch.zeros(1000)}
    if state["step"] < step:  # a retry after the checkpoint was saved
        time.sleep(TRAIN_S)
        torch.save({"step": step, "weights": state["weights"] + 1}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return len(results)


def main(directory: str) -> None:
    """Play and train until this process is ended."""
    import parsl  # noqa: TID251
    from parsl.config import Config  # noqa: TID251
    from parsl.executors import HighThroughputExecutor  # noqa: TID251
    from parsl.providers import LocalProvider  # noqa: TID251

    sizes = {"rollout": NUM_ROLLOUT_WORKERS, "engine": NUM_ENGINES, "train": 1}
    executors = [
        HighThroughputExecutor(
            label=label,
            address="127.0.0.1",
            max_workers_per_node=num,
            cores_per_worker=1e-6,
            provider=LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1),
            heartbeat_period=_HEARTBEAT_INTERVAL_S,
            heartbeat_threshold=_HEARTBEAT_TIMEOUT_S,
        )
        for label, num in sizes.items()
    ]
    run_dir = str(Path(directory) / "parsl")
    parsl.load(Config(executors=executors, retries=_NUM_RETRIES, strategy="none", run_dir=run_dir))
    (Path(directory) / "workers").mkdir()
    apps = {
        function.__name__: parsl.python_app(function, executors=[label])
        for label, function in (("rollout", play), ("engine", serve), ("train", train))
    }
    serving = [apps["serve"](index, directory) for index in range(NUM_ENGINES)]
    while len(list(Path(directory).glob("engine-*"))) < NUM_ENGINES:
        time.sleep(0.1)
    next_seed, step = 0, 0
    playing: set[Future[list[int]]] = set()
    training: Future[int] | None = None
    played: list[list[int]] = []
    while not any(engine.done() for engine in serving):
        while len(playing) < NUM_ROLLOUT_WORKERS:
            playing.add(apps["play"](list(range(next_seed, next_seed + _GROUPS_PER_APP)), directory))
            next_seed += _GROUPS_PER_APP
        running: list[Future[Any]] = [*playing, *([training] if training is not None else [])]
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        if training in done:
            assert training is not None
            training.result()
            with (Path(directory) / "steps").open("a") as steps:
                print(json.dumps({"step": step, "time": time.time()}), file=steps)
            training = None
        for one in done & playing:
            playing.remove(one)
            played.append(one.result())
        if training is None and len(played) >= NUM_ROLLOUT_WORKERS:
            step += 1
            training = apps["train"](step, played[:NUM_ROLLOUT_WORKERS], directory)
            del played[:NUM_ROLLOUT_WORKERS]
