"""Measure the cost of the OpenAI-compatible proxy against the engine behind it, in one run: `python -m bench.proxy`.

    latency    p50 of a call through the proxy : that of the same tokens requested from the engine directly
    rate       requests/s through the proxy over an engine that answers at once : an aiohttp application with one route
               that answers the same bytes
    CPU        of the bare server per request : of the proxy; the same as the rate if no other process uses the cores
    turns      p50 of a call with 200 turns of history : that of one with 10, over an engine that answers at once

Calls through the proxy and direct ones take turns, one at a time. `--engine vllm` measures latency on a real vLLM
engine, for which the bar is meant; without it the embedded engine is used. Both servers of the rate run in separate
processes, apart from the client.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.figures import Figure, main
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import TinyModel
from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, convert_to_chunk
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.rollout.turn import StreamingGenerator

BAR_LATENCY = 1.10
BAR_RATE = 0.4
BAR_TURNS = 3.0
SHORT, LONG, ROUNDS = 10, 200, 8
"""The turns of the two conversations that are compared, and the calls around each of which the median is taken."""
NUM_TOKENS = 64
ASKED = {"model": "hpcrl", "messages": [{"role": "user", "content": "what is 17+25? " * 8}], "max_tokens": NUM_TOKENS}
CONCURRENT = 32


class Instant:
    """An engine that returns the same completion at once."""

    def __init__(self) -> None:
        ids = [20 + n for n in range(16)]
        self._completion = Completion(token_ids=ids, logprobs=[-1.0] * 16, versions=[0] * 16, finish_reason="length")

    async def generate(self, request: GenerateRequest) -> Completion:
        return self._completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        yield convert_to_chunk(self._completion)


def _measure(full: bool, *, engine: str) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as root:
        model = _model(Path(root))
        overhead, straight_ms = asyncio.run(_latency(model, engine=engine, rounds=200 if full else 40))
        through, bare, cpu = _rates(model, seconds=20.0 if full else 8.0)
        short_s, long_s = asyncio.run(_turns(model, conversations=8 if full else 3))
    return [
        Figure(name=f"p50 latency, {engine}: proxy / straight", value=overhead, bar=BAR_LATENCY, better="lower"),
        Figure(name="p50 latency straight", value=straight_ms, unit="ms"),
        Figure(name="requests/s: proxy / bare aiohttp", value=through / bare, bar=BAR_RATE),
        Figure(name="requests/s through the proxy", value=through, unit="/s"),
        Figure(name="CPU per request: bare aiohttp / proxy", value=cpu),
        Figure(
            name=f"p50 of a call: {LONG} turns / {SHORT} turns", value=long_s / short_s, bar=BAR_TURNS, better="lower"
        ),
        Figure(name=f"p50 of a call with {LONG} turns", value=long_s * 1e3, unit="ms"),
    ]


def _model(root: Path) -> Path:
    from hpcrl.models.tiny import make_tiny_model

    make_tiny_model(root / "model", TinyModel(), seed=0)
    return root / "model"


def _session(template: ChatTemplate, *, context_length: int = 512) -> ProgramSession:
    limits = EpisodeLimits(max_turns=1 << 30, max_new_tokens=NUM_TOKENS, context_length=context_length, max_lag=1)
    return ProgramSession(
        name="b/0/0",
        trajectory="b/0",
        domain="b",
        seed=1,
        limits=limits,
        recording=ConversationRecording(template),
        newest_version=lambda: 0,
        start_version=0,
    )


# Latency


async def _latency(model: Path, *, engine: str, rounds: int) -> tuple[float, float]:
    template = load_chat_template(model)
    async with _vllm(model) if engine == "vllm" else _embedded(model) as opened:
        return await _compared(opened, template, rounds=rounds)


def _embedded(model: Path) -> AbstractAsyncContextManager[StreamingGenerator]:
    from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
    from hpcrl.testing.memory import MemoryStore

    return EmbeddedEngine(load_model(model, device="cpu"), store=MemoryStore(), prefix_bytes=0)


def _vllm(model: Path) -> AbstractAsyncContextManager[StreamingGenerator]:
    from hpcrl.engines.vllm.engine import VllmEngine
    from hpcrl.engines.vllm.server import VllmLaunch

    launch = VllmLaunch(model=model, log=model.parent / "vllm.log", dtype="float32", max_model_len=512)
    run = CampaignDir(model.parent)
    return VllmEngine(launch, place=WorkerPlace(run, run.job(0), "here"))


async def _compared(engine: StreamingGenerator, template: ChatTemplate, *, rounds: int) -> tuple[float, float]:
    """Return the ratio of the medians, and the direct one in ms; the two take turns, and the first rounds warm up."""
    seconds: dict[str, list[float]] = {"proxy": [], "straight": []}
    async with ModelProxy(engine, template=template) as proxy, aiohttp.ClientSession() as client:
        session = _session(template)
        headers = {"Authorization": f"Bearer {proxy.open(session)}"}
        ids = template.encode(template.render(ASKED["messages"]))  # type: ignore[arg-type]

        async def through() -> None:
            async with client.post(f"{proxy.url}/chat/completions", json=ASKED, headers=headers) as http:
                assert (await http.json())["usage"]["completion_tokens"] <= NUM_TOKENS

        async def straight() -> None:
            name = f"straight/{len(seconds['straight'])}"
            await engine.generate(GenerateRequest(request_id=name, token_ids=ids, max_new_tokens=NUM_TOKENS))

        for number in range(rounds + 4):
            for name, call in (("proxy", through), ("straight", straight))[:: 1 if number % 2 else -1]:
                took = await _timed(call)
                if number >= 4:
                    seconds[name].append(took)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return medians["proxy"] / medians["straight"], medians["straight"] * 1e3


async def _turns(model: Path, *, conversations: int) -> tuple[float, float]:
    """Return the seconds of a call in a short and in a long conversation: the medians of calls around those turns."""
    template = load_chat_template(model)
    seconds: dict[int, list[float]] = {SHORT: [], LONG: []}
    async with ModelProxy(Instant(), template=template) as proxy, aiohttp.ClientSession() as client:
        for _ in range(conversations):
            headers = {"Authorization": f"Bearer {proxy.open(_session(template, context_length=1 << 30))}"}
            messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 17+25? " * 8}]
            for turn in range(1, LONG + ROUNDS // 2):
                body = json.dumps({"model": "hpcrl", "messages": messages}).encode()
                started_at = time.perf_counter()
                async with client.post(f"{proxy.url}/chat/completions", data=body, headers=headers) as http:
                    answer = await http.json()
                took = time.perf_counter() - started_at
                for middle, taken in seconds.items():
                    if abs(turn - middle) < ROUNDS // 2:
                        taken.append(took)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "a line of output\n" * 20}]
    return statistics.median(seconds[SHORT]), statistics.median(seconds[LONG])


async def _timed(call: Callable[[], Awaitable[None]]) -> float:
    started_at = time.perf_counter()
    await call()
    return time.perf_counter() - started_at


# Rate


def _rates(model: Path, *, seconds: float) -> tuple[float, float, float]:
    """Return requests/s through the proxy and from a bare server, each the median of rounds that take turns.

    The third value is the ratio of the CPU times that both need for a request.
    """
    rates: dict[str, list[float]] = {"proxy": [], "bare": []}
    cpu_s = {"proxy": 0.0, "bare": 0.0}
    num = {"proxy": 0.0, "bare": 0.0}
    servers = {name: _Server(name, model) for name in rates}
    try:
        answer = asyncio.run(_one(servers["proxy"]))
        servers["bare"].pipe.send(answer)
        for number in range(6):
            for name in ("proxy", "bare") if number % 2 else ("bare", "proxy"):
                before = servers[name].cpu_s()
                rate = asyncio.run(_rate(servers[name], seconds=seconds / 12))
                if number:
                    rates[name].append(rate)
                    cpu_s[name] += servers[name].cpu_s() - before
                    num[name] += rate * seconds / 12
    finally:
        for server in servers.values():
            server.process.kill()
            server.process.join()
    each = {name: cpu_s[name] / num[name] for name in rates}
    return statistics.median(rates["proxy"]), statistics.median(rates["bare"]), each["bare"] / each["proxy"]


class _Server:
    """A server process."""

    def __init__(self, name: str, model: Path) -> None:
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        target = _serve_proxy if name == "proxy" else _serve_bare
        self.process = multiprocessing.get_context("spawn").Process(target=target, args=(str(model), theirs))
        self.process.start()
        self.url, self.key = self.pipe.recv()

    def cpu_s(self) -> float:
        """Return its CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _serve_proxy(model: str, pipe: Connection) -> None:
    async def serve() -> None:
        template = load_chat_template(Path(model))
        async with ModelProxy(Instant(), template=template) as proxy:
            session = _session(template)
            pipe.send((f"{proxy.url}/chat/completions", proxy.open(session)))
            while True:  # an episode has tens of turns, far fewer than a bench sends
                await asyncio.sleep(0.05)
                session.recording.turns.clear()
                session.recording._answers.clear()

    asyncio.run(serve())


def _serve_bare(_: str, pipe: Connection) -> None:
    answers: list[bytes] = []

    async def answer(http: web.Request) -> web.Response:
        await http.read()
        answers or answers.append(pipe.recv())
        return web.Response(body=answers[0], content_type="application/json")

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send((f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions", "none"))
        await asyncio.Event().wait()

    asyncio.run(serve())


async def _one(server: _Server) -> bytes:
    async with aiohttp.ClientSession() as client, client.post(server.url, json=ASKED, headers=_headers(server)) as http:
        answer: bytes = await http.read()
        assert http.status == 200, answer
        return answer


async def _rate(server: _Server, *, seconds: float) -> float:
    body, num = json.dumps(ASKED).encode(), 0
    end = time.perf_counter() + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=_headers(server)) as client:

        async def ask() -> None:
            nonlocal num
            while time.perf_counter() < end:
                async with client.post(server.url, data=body) as http:
                    await http.read()
                    num += 1

        await asyncio.gather(*(ask() for _ in range(CONCURRENT)))
    return num / seconds


def _headers(server: _Server) -> dict[str, Any]:
    return {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}


if __name__ == "__main__":
    wanted = "vllm" if "vllm" in sys.argv else "embedded"
    sys.argv = [argument for argument in sys.argv if argument not in ("--engine", "vllm", "embedded")]
    sys.exit(main("proxy", partial(_measure, engine=wanted)))
