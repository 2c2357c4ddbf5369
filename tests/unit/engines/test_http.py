"""The HTTP server of an engine and its client: access, invalid requests, and servers that do not answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from hpcrl.campaign_dir.endpoints import (
    NONCE_HEADER,
    PROOF_HEADER,
    EndpointReader,
    announce_endpoint,
    make_proof,
)
from hpcrl.engines import proved_connector
from hpcrl.engines.base import (
    Completion,
    GenerateRequest,
    KvHandle,
)
from hpcrl.engines.http import (
    RemoteEngine,
    fetch_kv_file,
    make_client_session,
    make_kv_fetcher,
    make_prover,
    serve_over_http,
)
from hpcrl.errors import EngineError, EngineRefusedError, EngineRequestError
from hpcrl.rollout.routing.router import Router
from hpcrl.system.tls import make_certificate
from tests.support.endpoints import make_endpoint
from tests.support.scripted_engine import ScriptedEngine

REQUEST = GenerateRequest(request_id="r", token_ids=[1, 2], max_new_tokens=1)
ROUTES = [("POST", "/generate"), ("POST", "/prefill"), ("POST", "/abort"), ("GET", "/load"), ("GET", "/kv/x")]


def on_server(body: Callable[[ScriptedEngine, str, aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        engine = ScriptedEngine()
        url, runner = await serve_over_http(engine, host="127.0.0.1", token="right")
        try:
            async with make_client_session() as session:
                return await body(engine, url, session)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def remote(url: str, session: aiohttp.ClientSession, *, token: str = "right") -> RemoteEngine:
    return RemoteEngine(make_endpoint("000-decode-1", url=url, token=token), session)


@pytest.mark.parametrize(
    "header", [None, "right", "Bearer wrong", "Bearer righ", "Bearer right "[:-1] + "x", "Basic right"]
)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_without_the_token(method: str, path: str, header: str | None) -> None:
    async def body(_: ScriptedEngine, url: str, __: aiohttp.ClientSession) -> int:
        headers = {} if header is None else {"Authorization": header}
        async with aiohttp.ClientSession() as session, session.request(method, url + path, headers=headers) as answer:
            return answer.status

    assert on_server(body) == 401


@pytest.mark.parametrize(
    "sent",
    [b"", b"{", b"[]", b'{"request_id": "r"}', b'{"request_id": 5, "token_ids": [1], "max_new_tokens": 1}', b"\xff"],
)
def test_a_body_that_cannot_be_read_is_answered_400_with_one_line(sent: bytes) -> None:
    async def body(_: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> tuple[int, dict[str, str]]:
        headers = {"Authorization": "Bearer right"}
        async with session.post(url + "/generate", data=sent, headers=headers) as answer:
            return answer.status, await answer.json()

    status, answer = on_server(body)
    assert status == 400
    assert list(answer) == ["error"]
    assert answer["error"].startswith("the body is not a valid GenerateRequest")
    assert "\n" not in answer["error"]


def test_an_unknown_route_is_answered_404() -> None:
    async def body(_: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> int:
        async with session.get(url + "/other", headers={"Authorization": "Bearer right"}) as answer:
            return answer.status

    assert on_server(body) == 404


def test_a_refusal_of_the_engine_is_an_engine_error_with_its_message() -> None:
    async def body(_: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> None:
        await remote(url, session).generate(msgspec.structs.replace(REQUEST, request_id="refuse"))

    with pytest.raises(EngineRequestError, match=r"^too long: 513 tokens"):
        on_server(body)


def test_a_bug_in_the_engine_is_not_shown_to_the_client() -> None:
    async def body(_: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> tuple[int, str]:
        data = msgspec.json.encode(msgspec.structs.replace(REQUEST, request_id="bug"))
        async with session.post(url + "/generate", data=data, headers={"Authorization": "Bearer right"}) as answer:
            return answer.status, await answer.text()

    status, text = on_server(body)
    assert status == 500
    assert "secret" not in text
    assert "Traceback" not in text


def test_a_client_that_hangs_up_takes_its_request_with_it() -> None:
    async def body(engine: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> None:
        asked = asyncio.create_task(remote(url, session).generate(msgspec.structs.replace(REQUEST, request_id="hang")))
        await engine.started.wait()
        asked.cancel()
        await asyncio.wait_for(engine.gone.wait(), timeout=30)

    on_server(body)


def test_a_handle_points_to_the_server_and_fetches_the_kv() -> None:
    async def body(_: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> tuple[str, KvHandle, bytes]:
        handle = await remote(url, session).prefill(REQUEST)
        return url, handle, await make_kv_fetcher(session)(handle)

    url, handle, data = on_server(body)
    assert (handle.url, handle.token) == (f"{url}/kv/abc", "right")
    assert data == b"kv" * 50


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"url": "file:///etc/passwd"}, "only http"),
        ({"url": "http://127.0.0.1:9/kv/abc"}, "was not received"),
        ({"url": "http://[bad"}, "was not received"),
        ({"token": "wrong"}, "did not prove"),
    ],
)
def test_kv_that_cannot_be_fetched_is_an_engine_error(change: dict[str, str], complaint: str) -> None:
    async def body(_: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> None:
        handle = await remote(url, session).prefill(REQUEST)
        await make_kv_fetcher(session)(msgspec.structs.replace(handle, **change))

    with pytest.raises(EngineError, match=complaint):
        on_server(body)


def test_kv_that_is_gone_or_too_large_is_an_engine_error() -> None:
    async def body(_: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> None:
        handle = await remote(url, session).prefill(REQUEST)
        with pytest.raises(EngineError, match="larger than 10 bytes"):
            await make_kv_fetcher(session, max_bytes=10)(handle)
        with pytest.raises(EngineError, match="answered 404"):
            await make_kv_fetcher(session)(msgspec.structs.replace(handle, url=f"{url}/kv/other"))

    on_server(body)


def test_a_worker_that_is_gone_is_an_engine_error_that_names_it() -> None:
    async def body(_: ScriptedEngine, __: str, session: aiohttp.ClientSession) -> None:
        await remote("http://127.0.0.1:9", session).load_figures()

    with pytest.raises(EngineError, match=r"000-decode-1 at http://127\.0\.0\.1:9/load did not answer"):
        on_server(body)


@pytest.mark.parametrize("answered", [b"<html>", b"{}"])
def test_an_invalid_answer_is_an_engine_error(answered: bytes) -> None:
    async def run() -> None:
        app = web.Application()

        async def nonsense(_: web.Request) -> web.Response:
            return web.Response(body=answered)

        app.router.add_get("/load", nonsense)
        app.router.add_get("/hello", nonsense)
        app.on_response_prepare.append(make_prover("right"))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with make_client_session() as session:
                await remote(f"http://127.0.0.1:{runner.addresses[0][1]}", session).load_figures()
        finally:
            await runner.cleanup()

    with pytest.raises(EngineError, match="an invalid answer"):
        asyncio.run(run())


class Impostor:
    """A server that takes over the port of an engine that has ended, and notes what it is sent."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str | None, bytes]] = []

    async def answer(self, http: web.BaseRequest) -> web.Response:
        self.received.append((http.path, http.headers.get("Authorization"), await http.read()))
        return web.json_response({"version": 3, "num_running": 0, "num_waiting": 0, "num_generated_tokens": 0})

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncIterator[int]:
        runner = web.ServerRunner(web.Server(self.answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


def test_a_server_with_a_certificate_generates_streams_and_hands_over_kv(tmp_path: Path) -> None:
    make_certificate(tmp_path / "tls.pem")

    async def run() -> None:
        engine = ScriptedEngine()
        url, runner = await serve_over_http(engine, host="127.0.0.1", token="right", certificate=tmp_path / "tls.pem")
        async with make_client_session(tmp_path / "tls.pem") as session:
            client = remote(url, session)
            assert (await client.generate(REQUEST)).token_ids == [7]
            assert [chunk.token_ids async for chunk in client.stream(REQUEST)] == [[7]]
            handle = await client.prefill(REQUEST)
            assert handle.url.startswith("https://")
            assert await make_kv_fetcher(session)(handle) == b"kv" * 50
        async with make_client_session() as stranger:
            with pytest.raises(EngineError, match="verify failed"):
                await remote(url, stranger).load_figures()
        await runner.cleanup()
        assert engine.num_load_requests == 0

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/load", "/generate"])
def test_a_stranger_on_the_port_of_an_engine_gets_neither_token_nor_prompt(path: str) -> None:
    impostor = Impostor()

    async def run() -> None:
        async with impostor.listen(0) as port, make_client_session() as session:
            engine = remote(f"http://127.0.0.1:{port}", session)
            await (engine.load_figures() if path == "/load" else engine.generate(REQUEST))

    with pytest.raises(EngineError, match="did not prove that it has the endpoint's token"):
        asyncio.run(run())
    assert impostor.received == [("/hello", None, b"")]


@pytest.mark.parametrize("asked", ["load", "generate", "stream", "kv"])
def test_an_impostor_on_the_port_of_an_engine_that_died_gets_nothing_of_an_idle_client(asked: str) -> None:
    impostor = Impostor()

    async def ask(engine: RemoteEngine, session: aiohttp.ClientSession) -> None:
        match asked:
            case "load":
                await engine.load_figures()
            case "generate":
                await engine.generate(REQUEST)
            case "stream":
                _ = [chunk async for chunk in engine.stream(REQUEST)]
            case "kv":
                url = f"{engine.endpoint.url}/kv/abc"
                await make_kv_fetcher(session)(KvHandle(url=url, token="right", version=3, num_tokens=1))

    async def run() -> None:
        url, runner = await serve_over_http(ScriptedEngine(), host="127.0.0.1", token="right")
        async with make_client_session() as session:
            engine = remote(url, session)
            await ask(engine, session)  # the engine has proved itself, on a connection that is kept
            await runner.cleanup()
            async with impostor.listen(int(url.rpartition(":")[2])):
                await ask(engine, session)

    with pytest.raises(EngineError, match="did not prove that it has the endpoint's token"):
        asyncio.run(run())
    assert impostor.received == [("/hello", None, b"")]


class Genuine(Impostor):
    """A server that has the token."""

    async def answer(self, http: web.BaseRequest) -> web.Response:
        answer = await super().answer(http)
        answer.headers[PROOF_HEADER] = make_proof("right", http.headers.get(NONCE_HEADER, ""))
        return answer


def test_a_connection_is_proved_once_and_used_for_many_requests() -> None:
    genuine = Genuine()

    async def run() -> None:
        async with genuine.listen(0) as port, make_client_session() as session:
            for _ in range(3):
                await remote(f"http://127.0.0.1:{port}", session).load_figures()

    asyncio.run(run())
    assert [path for path, *_ in genuine.received] == ["/hello", "/load", "/load", "/load"]


def test_a_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proved_connector, "PROOF_TIMEOUT_S", 0.2)

    async def run() -> None:
        server = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
        async with server, make_client_session() as session:
            await remote(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", session).load_figures()

    with pytest.raises(EngineError, match="did not answer"):
        asyncio.run(run())


def test_an_engine_computes_its_load_once_for_all_who_ask_at_a_time() -> None:
    async def body(engine: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> int:
        await asyncio.gather(*(remote(url, session).load_figures() for _ in range(50)))
        return engine.num_load_requests

    assert on_server(body) < 50


def test_an_address_that_cannot_be_listened_on_is_an_engine_error() -> None:
    async def run() -> None:
        await serve_over_http(ScriptedEngine(), host="203.0.113.1", token="t")

    with pytest.raises(EngineError, match=r"cannot listen on 203\.0\.113\.1"):
        asyncio.run(run())


class Full(ScriptedEngine):
    """An engine without room for any request."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status, self.num_asked = status, 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.num_asked += 1
        if self.status == 503:
            raise EngineRefusedError("8 requests wait here already")
        raise web.HTTPTooManyRequests(text="slowly")


@pytest.mark.parametrize("status", [503, 429])
def test_a_turn_that_one_engine_has_no_room_for_is_served_by_another(tmp_path: Path, status: int) -> None:
    async def run() -> tuple[Completion, int, dict[str, int]]:
        full, free = Full(status), ScriptedEngine()
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(make_client_session())
            for number, engine in enumerate((full, free)):
                url, runner = await serve_over_http(engine, host="127.0.0.1", token="right")
                stack.push_async_callback(runner.cleanup)
                name = f"000-decode-{number}"
                announce_endpoint(tmp_path, make_endpoint(name, url=url, token="right"))
            endpoints = EndpointReader(tmp_path, job=0)
            router = Router(endpoints, connect=lambda endpoint: RemoteEngine(endpoint, session), seed=0)
            await stack.enter_async_context(router)
            while not full.num_asked:
                answer = await router.generate(REQUEST)
            return answer, full.num_asked, router.reasons

    answer, num_asked, reasons = asyncio.run(run())
    assert answer.token_ids == [7]
    assert (num_asked, reasons["decode refused"], reasons["decode failed"]) == (1, 1, 0)


@pytest.mark.parametrize(
    "sent", [b"{", b"[]", b'{"request_id": 7}', b"\xff\xfe", b'{"request_id": "r", "token_ids": "x"}']
)
@pytest.mark.parametrize("path", ["/generate", "/stream", "/prefill", "/abort"])
def test_malformed_json_reaches_no_engine_on_any_route(path: str, sent: bytes) -> None:
    async def body(engine: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> tuple[int, Any]:
        async with session.post(url + path, data=sent, headers={"Authorization": "Bearer right"}) as http:
            return http.status, await http.json()

    status, answered = on_server(body)
    assert status == 400
    assert list(answered) == ["error"]
    assert "\n" not in answered["error"]


def test_a_file_with_kv_is_fetched_into_a_file_and_removed_where_it_was(tmp_path: Path) -> None:
    left, target, small = (tmp_path / name for name in ("left", "target", "small"))

    async def body(engine: ScriptedEngine, url: str, session: aiohttp.ClientSession) -> None:
        for path, most in ((target, 1000), (small, 99)):
            left.write_bytes(b"k" * 100)
            engine.file = left
            fetching = fetch_kv_file(session, f"{url}/kv/file", path, token="right", max_bytes=most)
            if most == 99:
                with pytest.raises(EngineError, match="larger than 99 bytes"):
                    await fetching
            else:
                await fetching

    on_server(body)
    assert target.read_bytes() == b"k" * 100
    assert list(tmp_path.iterdir()) == [target]
