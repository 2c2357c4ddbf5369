"""Real vLLM engines for tests, each behind its HTTP server, on an event loop that runs as long as they do."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import torch

from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import OUR_CONNECTOR
from hpcrl.engines.base import LoadFigures
from hpcrl.engines.http import RemoteEngine, make_client_session, serve_over_http
from hpcrl.engines.vllm.engine import VllmEngine
from hpcrl.engines.vllm.server import VllmLaunch
from hpcrl.system.files import make_private_dir
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.window.file import make_window_key
from tests.contract.test_engine import CONTEXT
from tests.support.endpoints import make_endpoint

T = TypeVar("T")
UP_S = 600.0


@dataclass
class Behind:
    """An engine and the endpoint of its HTTP server."""

    engine: VllmEngine
    endpoint: EngineEndpoint


@dataclass
class Place:
    """A campaign directory with weights in a window, and the event loop of its engines."""

    root: Path
    model: Path
    lora_rank: int = 0
    """The rank of the adapters that its engines get as versions."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self.campaign = CampaignDir(self.root)
        self.job = self.campaign.job(0)
        self.kv = self.root / "kv"
        for directory in (self.job.logs, self.campaign.weights, self.campaign.endpoints):
            make_private_dir(directory)
        self.window = WindowStore(make_window_key(self.campaign, node="here"), job=self.job)

    def do(self, work: Coroutine[Any, Any, T], *, timeout_s: float = UP_S) -> T:
        """Run a coroutine on the engines' loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def launch(self, name: str) -> VllmLaunch:
        return VllmLaunch(
            model=self.model,
            log=self.job.log(name),
            dtype="float32",
            max_model_len=CONTEXT if name == "first" else None,  # the contract is tested on the first
            max_batch=8,
            lora_rank=self.lora_rank,
            kv_connector=OUR_CONNECTOR,
            kv_dir=self.kv / name,
            extra_args=("--enforce-eager", "--block-size", "32"),
        )

    @contextmanager
    def engine(self, launch: VllmLaunch) -> Iterator[VllmEngine]:
        """Start one engine without its HTTP server, and end it after the block."""
        stack = AsyncExitStack()
        started = VllmEngine(launch, place=WorkerPlace(self.job, "here"))
        try:
            yield self.do(stack.enter_async_context(started))
        finally:
            self.do(stack.aclose())

    @contextmanager
    def engines(self, *names: str) -> Iterator[list[Behind]]:
        """Start engines with these names at the same time, and end them after the block."""
        stack = AsyncExitStack()
        try:
            yield self.do(self._start(stack, names))
        finally:
            self.do(stack.aclose())

    async def _start(self, stack: AsyncExitStack, names: tuple[str, ...]) -> list[Behind]:
        place = WorkerPlace(self.job, "here")
        session = await stack.enter_async_context(make_client_session())
        engines = [VllmEngine(self.launch(name), place=place, session=session) for name in names]
        await asyncio.gather(*(stack.enter_async_context(engine) for engine in engines))
        found = []
        for name, engine in zip(names, engines, strict=True):
            url, runner = await serve_over_http(engine, host="127.0.0.1", token="secret", max_load_age_s=0.0)
            stack.push_async_callback(runner.cleanup)
            endpoint = make_endpoint(name, node="here", url=url, token="secret")
            found.append(Behind(engine=engine, endpoint=endpoint))
        return found


@contextmanager
def place(root: Path, model: Path, *, lora_rank: int = 0) -> Iterator[Place]:
    """Yield a place whose loop runs in a thread until the block ends."""
    there = Place(root=root, model=model, lora_rank=lora_rank)
    thread = threading.Thread(target=there.loop.run_forever, name="engines", daemon=True)
    thread.start()
    try:
        yield there
    finally:
        there.window.unlink()
        there.window.close()
        there.loop.call_soon_threadsafe(there.loop.stop)
        thread.join()
        there.loop.close()


class Newcomer(RemoteEngine):
    """A used engine that counts its generated tokens from 0 again, as a new one does."""

    def __init__(self, endpoint: EngineEndpoint, session: aiohttp.ClientSession) -> None:
        super().__init__(endpoint, session)
        self._before: int | None = None

    async def load_figures(self) -> LoadFigures:
        figures = await super().load_figures()
        if self._before is None:
            self._before = figures.num_generated_tokens
        return msgspec.structs.replace(figures, num_generated_tokens=figures.num_generated_tokens - self._before)


TIE = 1e-3
"""Two logits this close, in units of their spread, count as equal: engines sum in different orders."""


def greedy(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Return transformers' next token after the prompt and each prefix of `answer`: `answer`, if that is greedy too.

    Of tokens that tie, it is the one in `answer`.
    """
    with torch.inference_mode():
        logits_QV = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    answer_Q = torch.tensor(answer)
    behind_Q = logits_QV.amax(-1) - logits_QV.gather(-1, answer_Q[:, None])[:, 0]
    tied_Q = behind_Q < TIE * logits_QV.std(-1)
    return list(torch.where(tied_Q, answer_Q, logits_QV.argmax(-1)).tolist())
