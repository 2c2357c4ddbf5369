"""Errors of clients and engines with a real vLLM server: an error in OpenAI's form, or a retry on another engine.

In every case the server has no work left for the request afterwards.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from hpcrl.campaign_dir.endpoints import HELLO_PATH, EndpointReader, EngineEndpoint, announce_endpoint
from hpcrl.engines.base import GenerateRequest, LoadFigures
from hpcrl.engines.http import RemoteEngine, make_client_session, make_prover
from hpcrl.errors import EngineError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.rollout.routing.engines import RouterTimeouts
from hpcrl.rollout.routing.router import Router
from tests.support.endpoints import make_endpoint
from tests.support.sessions import session_of

if TYPE_CHECKING:
    from tests.support.served import Behind

CONTEXT = 512
LIMITS = EpisodeLimits(max_turns=16, max_new_tokens=400, context_length=CONTEXT, max_lag=1)
QUESTION = [{"role": "user", "content": "1+1=?"}]
UNREADABLE = '{"model": "hpcrl", "messages": '
Ask = Callable[..., Awaitable[tuple[int, Any]]]


@asynccontextmanager
async def program(
    model: Path, endpoints: list[EngineEndpoint], directory: Path, *, ends: bool = True
) -> AsyncIterator[tuple[str, str, Ask]]:
    """Yield an agent program's access to these engines: the URL, its API key, and a function that sends a request.

    Unless the model `ends` its answers, they end only at their maximal length.
    """
    for endpoint in endpoints:
        announce_endpoint(directory, endpoint)
    patience = RouterTimeouts(
        refresh_interval_s=0.1, stall_timeout_s=5.0, first_pause_s=0.1, max_pause_s=1.0, max_attempts=8
    )
    template = load_chat_template(model)
    if not ends:
        template = replace(template, stop_token_ids=())
    async with (
        asyncio.timeout(300),
        make_client_session() as http,
        Router(
            EndpointReader(directory, job=0), connect=lambda one: RemoteEngine(one, http), seed=0, timeouts=patience
        ) as router,
        ModelProxy(router, template=template) as proxy,
        aiohttp.ClientSession() as client,
    ):
        key = proxy.open(session_of(template, limits=LIMITS))
        url = f"{proxy.url}/chat/completions"

        async def ask(body: str | None = None, *, api_key: str = key, **changed: Any) -> tuple[int, Any]:
            data = body or json.dumps({"model": "hpcrl", "messages": QUESTION, "max_tokens": 8} | changed)
            async with client.post(url, data=data, headers={"Authorization": f"Bearer {api_key}"}) as answer:
                return answer.status, await answer.json()

        yield url, key, ask


async def figures(behind: "Behind") -> LoadFigures:
    async with make_client_session() as http:
        return await RemoteEngine(behind.endpoint, http).load_figures()


async def at_rest(behind: "Behind") -> bool:
    """Wait until the server has released its requests."""
    async with asyncio.timeout(60):
        while (found := await figures(behind)).num_running or found.num_waiting:
            await asyncio.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({"api_key": "wrong"}, 401, "invalid_api_key"),
        ({"body": UNREADABLE}, 400, "invalid_json"),
        ({"model": "another"}, 404, "model_not_found"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400, "context_length_exceeded"),
        ({"n": -1}, 400, "invalid_value"),
    ],
    ids=["wrong-token", "malformed-json", "unknown-model", "prompt-too-long", "nonsense"],
)
def test_an_invalid_request_is_an_error_and_the_next_one_is_served(
    pair: "list[Behind]", slow_model_dir: Path, tmp_path: Path, asked: dict[str, Any], status: int, code: str
) -> None:
    async def body() -> None:
        async with program(slow_model_dir, [pair[0].endpoint], tmp_path) as (_, _, ask):
            seen, answer = await ask(**asked)
            assert (seen, answer["error"]["code"]) == (status, code)
            assert (await ask())[0] == 200
            assert await at_rest(pair[0])

    asyncio.run(body())


def test_a_client_that_disconnects_in_mid_stream_leaves_no_request_behind(
    pair: "list[Behind]", slow_model_dir: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        async with program(slow_model_dir, [pair[0].endpoint], tmp_path, ends=False) as (url, key, ask):
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(headers=headers) as client:
                before = await figures(pair[0])
                asked = {"model": "hpcrl", "messages": QUESTION, "stream": True, "max_tokens": 400}
                async with client.post(url, json=asked) as answer:
                    assert (await answer.content.readany()).startswith(b"data: ")
                    assert (await figures(pair[0])).num_running, "the request is still running"
                    answer.close()
                assert await at_rest(pair[0])
                after = await figures(pair[0])
                assert after.num_generated_tokens < before.num_generated_tokens + 400, "it was not generated to its end"
            assert (await ask())[0] == 200

    asyncio.run(body())


@pytest.mark.parametrize("mood", ["answers 500", "answers nonsense", "hangs up", "is silent"])
def test_an_engine_that_fails_is_replaced_by_one_that_answers(
    pair: "list[Behind]", slow_model_dir: Path, tmp_path: Path, mood: str
) -> None:
    async def body() -> None:
        async with (
            moody(mood) as bad,
            program(slow_model_dir, [bad, pair[0].endpoint], tmp_path) as (_, _, ask),
        ):
            answers = await asyncio.gather(*(ask() for _ in range(6)))
            assert {status for status, _ in answers} == {200}
            assert await at_rest(pair[0])

    asyncio.run(body())


def test_engines_that_all_fail_are_a_server_error_and_no_hung_episode(slow_model_dir: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            moody("answers 500") as bad,
            program(slow_model_dir, [bad], tmp_path) as (_, _, ask),
        ):
            status, answer = await ask()
            assert (status, answer["error"]["code"]) == (503, "engine_unavailable")

    asyncio.run(body())


def test_a_worker_is_reached_with_its_own_token_only(pair: "list[Behind]") -> None:
    endpoint = pair[0].endpoint
    wrong = make_endpoint(url=endpoint.url, token="wrong")

    async def body() -> None:
        async with make_client_session() as http:
            with pytest.raises(EngineError, match="did not prove"):
                await RemoteEngine(wrong, http).generate(
                    GenerateRequest(request_id="r", token_ids=[5], max_new_tokens=1)
                )

    asyncio.run(body())
    assert asyncio.run(at_rest(pair[0]))


@asynccontextmanager
async def moody(mood: str) -> AsyncIterator[EngineEndpoint]:
    """Serve a worker that reports the load of an idle one, and fails at everything else."""
    load = {"version": 0, "num_running": 0, "num_waiting": 0, "num_generated_tokens": 0, "free_kv_tokens": 10**6}

    async def answer(http: web.Request) -> web.Response:
        if http.path == "/load":
            return web.json_response(load)
        if http.path == HELLO_PATH:
            return web.json_response({})
        match mood:
            case "answers 500":
                raise web.HTTPInternalServerError(text="out of memory")
            case "answers nonsense":
                return web.json_response({"token_ids": "all of them"})
            case "hangs up":
                assert http.transport is not None
                http.transport.close()
            case _:
                await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.on_response_prepare.append(make_prover("t"))
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield make_endpoint("moody", url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def test_the_server_keeps_an_idle_connection_for_longer_than_its_client(pair: "list[Behind]") -> None:
    """A request on a connection that the server closes at that moment would fail."""

    async def ask_twice() -> list[bytes]:
        reader, writer = await asyncio.open_unix_connection(str(pair[0].engine.server.socket_path))
        lines = []
        for pause_s in (6.0, 0.0):  # vLLM's own limit is 5 s
            writer.write(b"GET /version HTTP/1.1\r\nHost: vllm\r\n\r\n")
            lines.append(await reader.readline())
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"content-length: (\d+)", head.lower())
            await reader.readexactly(int(length))
            await asyncio.sleep(pause_s)
        writer.close()
        return lines

    assert asyncio.run(ask_twice()) == [b"HTTP/1.1 200 OK\r\n"] * 2
