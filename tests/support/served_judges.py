"""Judges for tests: an engine of ours behind the address of a judge, announced like that of a campaign."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.campaign_dir.endpoints import announce_endpoint, withdraw_endpoint
from hpcrl.config.recipe import EngineConfig, JudgeConfig, SimulatedEngineConfig
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.engines.sim.engine import make_sim_engine
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.rollout.judges.server import EngineApi, serve_judge
from hpcrl.system.files import make_private_dir
from tests.support.endpoints import make_endpoint

T = TypeVar("T")


@contextlib.asynccontextmanager
async def open_judge(
    model_dir: Path,
    directory: Path,
    *,
    backend: str = "embedded",
    worker: str = "000-judge-grader-0",
    job: int = 0,
    certificate: Path | None = None,
) -> AsyncIterator[str]:
    """Serve the model as the judge "grader", and announce it; yields its URL."""
    config = EngineConfig(backend=backend, sim=SimulatedEngineConfig(speed=100.0))  # type: ignore[arg-type]
    judge = JudgeConfig(path=str(model_dir), engine=config)
    engine: Any = (
        EmbeddedEngine(load_model(model_dir, device="cpu"), store=None)
        if backend == "embedded"
        else make_sim_engine(model_dir, config, gpu=GPU_CATALOGUE["h100"], num_gpus=1)
    )
    async with (
        engine,
        EngineApi(engine, name="grader", judge=judge, model_dir=model_dir) as api,
        serve_judge(api, host="127.0.0.1", token=f"token of {worker} {id(api)}", certificate=certificate) as url,
    ):
        endpoint = make_endpoint(worker, role="judge-grader", url=url, token=f"token of {worker} {id(api)}", job=job)
        announce_endpoint(make_private_dir(directory), endpoint)
        try:
            yield url
        finally:
            withdraw_endpoint(directory, worker)


class JudgeHost:
    """An event loop in a thread, on which judges are started and ended."""

    def __init__(self, model_dir: Path, directory: Path) -> None:
        self.directory = make_private_dir(directory)
        self._model_dir = model_dir
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._opened: list[Any] = []

    def start(self, **facts: Any) -> str:
        opened = open_judge(self._model_dir, self.directory, **facts)
        self._opened.append(opened)
        return self.do(opened.__aenter__())

    def end(self) -> None:
        """End the judge that was started last."""
        self.do(self._opened.pop().__aexit__(None, None, None))

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        while self._opened:
            self.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def judge_host(model_dir: Path, directory: Path) -> Iterator[JudgeHost]:
    """Yield a host of judges; all that are left are ended after the block."""
    host = JudgeHost(model_dir, directory)
    try:
        yield host
    finally:
        host.close()
