"""Measure the cost of the OpenAI-compatible proxy against the engine behind it, in one run: `python -m bench.proxy`.

    latency    p50 of a call through the proxy : that of the same tokens requested from the engine directly
    rate       requests/s through the proxy over an engine that answers at once : an aiohttp application with one route
               that answers the same bytes
    CPU        of the bare server per request : of the proxy; the same as the rate if no other process uses the cores
    turns      CPU of a call with 200 turns of history : that of one with 10, over an engine that answers at once; and
               the same for a bare server that only parses the body, which holds the whole history
    processes  calls/s that two proxies in two processes answer, with 200 turns of history : that one answers
    stream     tokens/s that one event loop sends as server-sent events, one by one, per second of CPU

Turns are measured with the tiny model's template, by each API, and with the templates of three families. The model of
one thinks, and its template leaves old thoughts out: there the user asks again after each answer, or after every ten
tool calls. Turns and streams are CPU times of the server, so that other processes do not count. Calls through the proxy
and direct ones take turns, one at a time. The clients of the two processes are threads that send and receive bytes, on
the same two cores. `--engine vllm` measures latency on a real vLLM engine, for which the bar is meant; without it the
embedded engine is used. Both servers of the rate run in separate processes, apart from the client.
"""

import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from bench.figures import Figure, main
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import EngineConfig, TinyModel
from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, convert_to_chunk
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.answer_parser import AnswerParser, choose_parsers
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.rollout.turn import StreamingGenerator
from hpcrl.testing.model_templates import FAMILIES, save_family

BAR_LATENCY = 1.10
BAR_RATE = 0.4
BAR_TURNS = 3.0
BAR_PROCESSES = 1.6
"""Below 2, as clients use the two cores too."""
SHORT, LONG, ROUNDS = 10, 200, 8
"""The turns of the two conversations that are compared, and the calls around each of which the CPU is taken."""
MAX_TURNS = 50 * LONG
"""The turns after which a server starts another episode."""


CHAT = "chat/completions"


@dataclass(frozen=True, kw_only=True)
class TurnCase:
    """A model, and what it generates in each turn."""

    name: str
    family: str = ""
    """Whose template it has; "": the tiny model's."""
    answer_text: str = ""
    """What it generates; "": some tokens."""
    has_tools: bool = False
    path: str = CHAT
    """The API that it is called by."""

    def save_model(self, tiny: Path) -> Path:
        """Save the model beside the tiny one, or return that."""
        return save_family(tiny.parent / self.name, FAMILIES[self.family]) if self.family else tiny

    def list_new(self, turn: int) -> list[dict[str, Any]]:
        """Return the messages that follow the answer of a turn."""
        question = {"role": "user", "content": "a line of output\n" * 20}
        if not self.has_tools:
            return [question]
        return [{**question, "role": "tool"}, *([question] if turn % 10 == 0 else [])]

    def list_answer(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what a program sends again of an answer."""
        match self.path:
            case "responses":
                return list(answer["output"])
            case "messages":
                return [{"role": "assistant", "content": answer["content"]}]
        return [answer["choices"][0]["message"]]


THOUGHT = "a thought of a model, " * 10
TURN_CASES = (
    TurnCase(name="tiny"),
    TurnCase(name="tiny, responses", path="responses"),
    TurnCase(name="tiny, messages", path="messages"),
    TurnCase(name="Qwen2.5", family="Qwen2.5"),
    TurnCase(name="Llama-3.1, 3.3", family="Llama-3.1, 3.3"),
    TurnCase(
        name="Qwen3, questions",
        family="Qwen3",
        answer_text=FAMILIES["Qwen3"].write_answer("an answer of a model", thought=THOUGHT),
    ),
    TurnCase(
        name="Qwen3, tools",
        family="Qwen3",
        answer_text=FAMILIES["Qwen3"].write_call("look", {"x": 1}, thought=THOUGHT),
        has_tools=True,
    ),
)
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
NUM_TOKENS = 64
ASKED = {"model": "hpcrl", "messages": [{"role": "user", "content": "what is 17+25? " * 8}], "max_tokens": NUM_TOKENS}
CONCURRENT = 32
INSTANT_TOKENS = 16
"""The tokens of an answer of the engine that answers at once."""


class Instant:
    """An engine that returns the same completion at once."""

    def __init__(self, ids: Sequence[int] = range(20, 20 + INSTANT_TOKENS)) -> None:
        num = len(ids)
        self._completion = Completion(
            token_ids=list(ids), logprobs=[-1.0] * num, versions=[0] * num, finish_reason="stop"
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        return self._completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        whole = convert_to_chunk(self._completion)
        for place, token in enumerate(whole.token_ids):
            ends = place == len(whole.token_ids) - 1
            yield CompletionChunk(
                token_ids=[token], logprobs=[-1.0], versions=[0], finish_reason="length" if ends else None
            )
            await asyncio.sleep(0)


def _measure(full: bool, *, engine: str) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as root:
        model = _model(Path(root))
        overhead, straight_ms = asyncio.run(_latency(model, engine=engine, rounds=200 if full else 40))
        through, bare, cpu = _rates(model, seconds=20.0 if full else 8.0)
        turns = [figure for case in TURN_CASES for figure in _turn_figures(case, model, conversations=8 if full else 3)]
        one, two = _process_rates(model, seconds=4.0 if full else 2.0)
        streamed = _streamed(model, seconds=8.0 if full else 3.0)
    return [
        Figure(name=f"p50 latency, {engine}: proxy / straight", value=overhead, bar=BAR_LATENCY, better="lower"),
        Figure(name="p50 latency straight", value=straight_ms, unit="ms"),
        Figure(name="requests/s: proxy / bare aiohttp", value=through / bare, bar=BAR_RATE),
        Figure(name="requests/s through the proxy", value=through, unit="/s"),
        Figure(name="CPU per request: bare aiohttp / proxy", value=cpu),
        *turns,
        Figure(name=f"calls/s, {LONG} turns: two processes / one", value=two / one, bar=BAR_PROCESSES),
        Figure(name=f"calls/s, {LONG} turns: one process", value=one, unit="/s"),
        Figure(name="streamed tokens per second of CPU", value=streamed, unit="/s"),
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
    campaign = CampaignDir(model.parent)
    return VllmEngine(launch, place=WorkerPlace(campaign.job(0), "here"))


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


async def _timed(call: Callable[[], Awaitable[None]]) -> float:
    started_at = time.perf_counter()
    await call()
    return time.perf_counter() - started_at


# Turns


def _turn_figures(case: TurnCase, model: Path, *, conversations: int) -> list[Figure]:
    """Return the CPU of a call in a long and in a short conversation, and that of a server that only parses bodies."""
    directory = case.save_model(model)
    found: dict[str, dict[int, float]] = {}
    answer = b""
    for kind in ("proxy", "bare"):
        server = _Server(kind, directory, answer_text=case.answer_text)
        try:
            if kind == "bare":
                server.pipe.send(answer)
            else:
                answer = asyncio.run(_one(server, case))
            found[kind] = asyncio.run(_turn_cpu_s(server, case, conversations=conversations))
        finally:
            server.end()
    ratios = {kind: seconds[LONG] / seconds[SHORT] for kind, seconds in found.items()}
    what = f"CPU of a call, {case.name}: {LONG} turns"
    return [
        Figure(name=f"{what} / {SHORT} turns", value=ratios["proxy"], bar=BAR_TURNS, better="lower"),
        Figure(name=f"{what} / {SHORT} turns, bare server that parses", value=ratios["bare"]),
        Figure(name=f"{what}", value=found["proxy"][LONG] * 1e3, unit="ms"),
        Figure(name=f"{what}, bare server that parses", value=found["bare"][LONG] * 1e3, unit="ms"),
    ]


async def _turn_cpu_s(server: "_Server", case: TurnCase, *, conversations: int) -> dict[int, float]:
    """Return the server's CPU time of a call by the turns of the conversation: the median over the conversations."""
    found: dict[int, list[float]] = {SHORT: [], LONG: []}
    async with aiohttp.ClientSession(headers=_headers(server)) as client:
        for conversation in range(conversations):
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"what is {conversation}+25? " * 8}]
            started_at = 0.0
            for turn in range(1, LONG + ROUNDS // 2 + 1):
                for middle, times in found.items():
                    if turn == middle - ROUNDS // 2:
                        started_at = server.cpu_s()
                    if turn == middle + ROUNDS // 2:
                        times.append((server.cpu_s() - started_at) / ROUNDS)
                await _take_turn(client, server, messages, case, turn)
    return {middle: statistics.median(times) for middle, times in found.items()}


async def _take_turn(
    client: aiohttp.ClientSession, server: "_Server", messages: list[dict[str, Any]], case: TurnCase, turn: int
) -> None:
    """Let the model answer the conversation, and add its answer and what follows."""
    async with client.post(f"{server.url}/{case.path}", data=_encode_call(messages, case)) as http:
        answer = await http.json()
    messages += [*case.list_answer(answer), *case.list_new(turn)]


def _encode_call(messages: list[dict[str, Any]], case: TurnCase) -> bytes:
    tools = {"tools": TOOLS} if case.has_tools else {}
    return json.dumps(
        {"model": "hpcrl", "input" if case.path == "responses" else "messages": messages, **tools}
    ).encode()


# Processes


def _process_rates(model: Path, *, seconds: float) -> tuple[float, float]:
    """Return the calls/s in long conversations of one proxy and of two together, medians of rounds that take turns."""
    servers = [_Server("proxy", model) for _ in range(2)]
    rates: dict[int, list[float]] = {1: [], 2: []}
    try:
        request = asyncio.run(_prepare_long_call(servers))
        for _ in range(5):
            for num, found in rates.items():
                found.append(_call_rate(servers[:num], request, seconds=seconds))
    finally:
        for server in servers:
            server.end()
    return statistics.median(rates[1]), statistics.median(rates[2])


async def _prepare_long_call(servers: list["_Server"]) -> bytes:
    """Play a long conversation on each server; return the body of its last call, to be sent again and again."""
    case = TURN_CASES[0]
    for server in servers:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 17+25? " * 8}]
        async with aiohttp.ClientSession(headers=_headers(server)) as client:
            for turn in range(1, LONG):
                await _take_turn(client, server, messages, case, turn)
    return _encode_call(messages, case)


def _call_rate(servers: list["_Server"], body: bytes, *, seconds: float) -> float:
    """Return how many calls the servers answer in a second, each to four clients in threads."""
    end, counts = time.perf_counter() + seconds, list[int]()
    threads = [
        threading.Thread(target=_send_calls, args=(server, body, end, counts)) for server in servers for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def _send_calls(server: "_Server", body: bytes, end: float, counts: list[int]) -> None:
    """Send the same call until `end`, on one connection: a client of a few system calls leaves the cores to servers."""
    host, _, path = server.url.removeprefix("http://").partition("/")
    head = f"POST /{path}/{CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    request = (head + f"Authorization: Bearer {server.key}\r\n\r\n").encode() + body
    num = 0
    with socket.create_connection((host.partition(":")[0], int(host.partition(":")[2]))) as connection:
        while time.perf_counter() < end:
            connection.sendall(request)
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200"), received
            header, _, rest = received.partition(b"\r\n\r\n")
            length = int(header.lower().partition(b"content-length: ")[2].split()[0])
            while len(rest) < length:
                rest += connection.recv(1 << 16)
            num += 1
    counts.append(num)


# Streams


def _streamed(model: Path, *, seconds: float) -> float:
    """Return the streamed tokens per second of the server's CPU."""
    server = _Server("proxy", model)
    try:
        before = server.cpu_s()
        rate = asyncio.run(_rate(server, seconds=seconds, asked={**ASKED, "stream": True}))
        return rate * seconds * INSTANT_TOKENS / (server.cpu_s() - before)
    finally:
        server.end()


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
            server.end()
    each = {name: cpu_s[name] / num[name] for name in rates}
    return statistics.median(rates["proxy"]), statistics.median(rates["bare"]), each["bare"] / each["proxy"]


class _Server:
    """A server process."""

    def __init__(self, name: str, model: Path, *, answer_text: str = "") -> None:
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        target = _serve_proxy if name == "proxy" else _serve_bare
        self.process = multiprocessing.get_context("spawn").Process(
            target=target, args=(str(model), theirs, answer_text)
        )
        self.process.start()
        self.url, self.key = self.pipe.recv()

    def cpu_s(self) -> float:
        """Return the CPU time of its threads so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _serve_proxy(model: str, pipe: Connection, answer_text: str) -> None:
    async def serve() -> None:
        template = load_chat_template(Path(model))
        parser = AnswerParser.from_choice(choose_parsers(template.text, EngineConfig()), template, Path(model))
        engine = Instant(template.encode(answer_text)) if answer_text else Instant()
        async with ModelProxy(engine, template=template, parser=parser) as proxy:
            session = _session(template, context_length=1 << 30)
            pipe.send((proxy.url, proxy.open(session)))
            while True:
                await asyncio.sleep(0.05)
                if len(session.recording.turns) > MAX_TURNS:
                    session.recording = ConversationRecording(template)

    asyncio.run(serve())


def _serve_bare(_: str, pipe: Connection, __: str) -> None:
    answers: list[bytes] = []

    async def answer(http: web.Request) -> web.Response:
        msgspec.json.decode(await http.read())
        if not answers:
            answers.append(pipe.recv())
        return web.Response(body=answers[0], content_type="application/json")

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/{path:.+}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send((f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "none"))
        await asyncio.Event().wait()

    asyncio.run(serve())


async def _one(server: _Server, case: TurnCase = TURN_CASES[0]) -> bytes:
    url, body = f"{server.url}/{case.path}", _encode_call(ASKED["messages"], case)  # type: ignore[arg-type]
    async with aiohttp.ClientSession() as client, client.post(url, data=body, headers=_headers(server)) as http:
        answer: bytes = await http.read()
        assert http.status == 200, answer
        return answer


async def _rate(server: _Server, *, seconds: float, asked: dict[str, Any] = ASKED) -> float:
    body, num = json.dumps(asked).encode(), 0
    end = time.perf_counter() + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=_headers(server)) as client:

        async def ask() -> None:
            nonlocal num
            while time.perf_counter() < end:
                async with client.post(f"{server.url}/{CHAT}", data=body) as http:
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
