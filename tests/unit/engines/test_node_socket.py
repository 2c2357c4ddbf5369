"""The socket of an engine: turns are answered as over HTTP, strangers are not, and what it cannot do goes by HTTP."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.campaign_dir.endpoints import make_proof
from hpcrl.engines import node_socket
from hpcrl.engines.base import Completion, GenerateRequest, InferenceEngine
from hpcrl.engines.http import serve_over_http
from hpcrl.engines.node_socket import EngineConnections, serve_over_socket
from hpcrl.errors import EngineError, EngineRequestError
from hpcrl.spool.routed_experts import make_span
from hpcrl.system.network import current_node
from tests.support.completions import make_completion
from tests.support.endpoints import make_endpoint
from tests.support.scripted_engine import ScriptedEngine

Body = Callable[[ScriptedEngine, "Served"], Awaitable[Any]]


class Served:
    """An engine behind both servers, which can be closed apart."""

    def __init__(self, stack: AsyncExitStack, socket_stack: AsyncExitStack, url: str, socket: str) -> None:
        self.stack, self.socket_stack, self.url, self.socket = stack, socket_stack, url, socket

    def connect(self, connections: EngineConnections, **changed: Any) -> InferenceEngine:
        fields = {"url": self.url, "token": "right", "node": current_node(), "socket": self.socket} | changed
        return connections.connect(make_endpoint("000-decode-1", **fields))


def on_server(body: Body, *, has_http: bool = False) -> Any:
    """Run `body` with an engine behind a socket, and behind HTTP if asked for."""

    async def run() -> Any:
        engine = ScriptedEngine()
        async with AsyncExitStack() as stack, AsyncExitStack() as socket_stack:
            url = "http://127.0.0.1:1"
            if has_http:
                url, runner = await serve_over_http(engine, host="127.0.0.1", token="right")
                stack.push_async_callback(runner.cleanup)
            socket = await socket_stack.enter_async_context(serve_over_socket(engine, token="right"))
            return await body(engine, Served(stack, socket_stack, url, socket))

    return asyncio.run(run())


def turn(request_id: str = "r", **changed: Any) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, **{"token_ids": [1, 2], "max_new_tokens": 1, **changed})


@asynccontextmanager
async def raw_connection(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(served.socket)
    yield reader, writer
    writer.close()


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("!I", await reader.readexactly(4))
    return await reader.readexactly(length)


def test_many_turns_at_once_are_each_answered_on_one_connection_without_http() -> None:
    async def body(_: ScriptedEngine, served: Served) -> list[list[int]]:
        async with EngineConnections() as connections:
            engine = served.connect(connections)
            answers = await asyncio.gather(*(engine.generate(turn(f"r{index}")) for index in range(300)))
            return [answer.token_ids for answer in answers]

    assert on_server(body) == [[7]] * 300


def test_a_refused_turn_is_the_requests_fault_as_over_http() -> None:
    async def body(_: ScriptedEngine, served: Served) -> None:
        async with EngineConnections() as connections:
            await served.connect(connections).generate(turn("refuse"))

    with pytest.raises(EngineRequestError, match=r"^too long: 513 tokens$"):
        on_server(body)


def test_a_bug_in_the_engine_names_the_worker_and_shows_only_its_kind() -> None:
    async def body(_: ScriptedEngine, served: Served) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with EngineConnections() as connections:
            await served.connect(connections).generate(turn("bug"))

    with pytest.raises(EngineError, match=r"000-decode-1 .* answered 500: .* ZeroDivisionError: see its log") as raised:
        on_server(body)
    assert "secret" not in str(raised.value)


def test_cancelling_a_turn_ends_it_in_the_engine_and_its_id_can_be_used_again() -> None:
    async def body(engine: ScriptedEngine, served: Served) -> list[int]:
        async with EngineConnections() as connections:
            near = served.connect(connections)
            hanging = asyncio.create_task(near.generate(turn("hang")))
            await engine.started.wait()
            hanging.cancel()
            await asyncio.wait({hanging})
            async with asyncio.timeout(5):
                await engine.gone.wait()
            return (await near.generate(turn("r"))).token_ids

    assert on_server(body) == [7]


def test_a_client_that_goes_ends_its_turns() -> None:
    async def body(engine: ScriptedEngine, served: Served) -> None:
        async with EngineConnections() as connections:
            hanging = asyncio.create_task(served.connect(connections).generate(turn("hang")))
            await engine.started.wait()
        async with asyncio.timeout(5):
            await engine.gone.wait()
        with pytest.raises(EngineError, match="did not answer"):
            await hanging

    on_server(body)


def test_a_server_that_goes_fails_its_turns_and_the_next_go_by_http() -> None:
    async def body(engine: ScriptedEngine, served: Served) -> list[int]:
        async with EngineConnections() as connections:
            near = served.connect(connections)
            hanging = asyncio.create_task(near.generate(turn("hang")))
            await engine.started.wait()
            await served.socket_stack.aclose()
            with pytest.raises(EngineError, match=r"000-decode-1 at .* did not answer"):
                await hanging
            return (await near.generate(turn("r"))).token_ids

    assert on_server(body, has_http=True) == [7]


@pytest.mark.parametrize(
    "changed",
    [{"socket": "/nowhere/s"}, {"socket": ""}, {"node": "another"}, {"socket": "/nowhere/" + "long" * 100}],
    ids=["absent", "none", "another-node", "too-long"],
)
def test_without_a_socket_turns_go_by_http(changed: dict[str, str]) -> None:
    async def body(_: ScriptedEngine, served: Served) -> list[int]:
        async with EngineConnections() as connections:
            return (await served.connect(connections, **changed).generate(turn())).token_ids

    assert on_server(body, has_http=True) == [7]


def test_a_turn_larger_than_a_frame_goes_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_socket, "MAX_BODY_BYTES", 5000)

    async def body(engine: ScriptedEngine, served: Served) -> list[list[int]]:
        async with EngineConnections() as connections:
            near = served.connect(connections)
            large = turn("r", token_ids=[1] * 10_000)
            return [(await near.generate(request)).token_ids for request in (turn(), large, turn())]

    assert on_server(body, has_http=True) == [[7]] * 3


def test_an_answer_with_the_experts_of_a_long_prompt_is_larger_than_any_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_span(0, np.zeros((1000, 48, 8), np.uint8))

    async def body(engine: ScriptedEngine, served: Served) -> None:
        async def report(request: GenerateRequest) -> Completion:
            return make_completion(experts=[experts])

        monkeypatch.setattr(engine, "generate", report)
        async with EngineConnections() as connections:
            answer = await served.connect(connections).generate(turn())
            assert answer.experts == [experts]

    assert len(experts.data) > 5000
    monkeypatch.setattr(node_socket._FrameProtocol, "max_frame_bytes", 5000)
    on_server(body)


def test_prompts_of_a_million_tokens_and_answers_in_any_order() -> None:
    async def body(engine: ScriptedEngine, served: Served) -> list[list[int]]:
        async with EngineConnections() as connections:
            near = served.connect(connections)
            large = turn("large", token_ids=[150_000] * 1_000_000)
            answers = await asyncio.gather(near.generate(large), near.generate(turn("small")))
            return [answer.token_ids for answer in answers]

    assert on_server(body) == [[7]] * 2


def test_a_large_turn_that_arrives_together_with_the_token_is_answered() -> None:
    async def body(_: ScriptedEngine, served: Served) -> bytes:
        async with raw_connection(served) as (reader, writer), asyncio.timeout(5):
            writer.write(frame(b"nonce"))
            await read_frame(reader)
            request = msgspec.msgpack.encode([1, turn(token_ids=[7] * 5000)])
            writer.write(frame(b"right") + frame(request))
            return await read_frame(reader)

    assert msgspec.msgpack.decode(on_server(body))[1]["token_ids"] == [7]


# ---- strangers


def test_a_client_without_the_token_is_cut_off() -> None:
    async def body(_: ScriptedEngine, served: Served) -> None:
        async with raw_connection(served) as (reader, writer):
            writer.write(frame(b"nonce"))
            assert await read_frame(reader) == make_proof("right", "nonce").encode()
            writer.write(frame(b"wrong") + frame(b"\x92\x01\xc0"))
            async with asyncio.timeout(5):
                with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                    await read_frame(reader)

    on_server(body)


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", frame(b"\xff\xfe"), frame(b"x" * 2000)])
def test_garbage_instead_of_a_greeting_is_cut_off(sent: bytes) -> None:
    async def body(_: ScriptedEngine, served: Served) -> None:
        async with raw_connection(served) as (reader, writer), asyncio.timeout(5):
            writer.write(sent)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await read_frame(reader)

    on_server(body)


@pytest.mark.parametrize("sent", [b"", b"\xc1", b"{}", b"\x92\x01" + b"\x91" * 5000])
def test_garbage_of_a_client_with_the_token_is_cut_off(sent: bytes) -> None:
    async def body(_: ScriptedEngine, served: Served) -> None:
        async with raw_connection(served) as (reader, writer), asyncio.timeout(5):
            writer.write(frame(b"nonce") + frame(b"right"))
            await read_frame(reader)
            writer.write(frame(sent))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await read_frame(reader)

    on_server(body)


def test_a_server_without_the_token_gets_no_token_and_turns_go_by_http(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(frame(b"proof"))
        seen.append(await reader.read())
        writer.close()

    async def body(_: ScriptedEngine, served: Served) -> list[int]:
        async with await asyncio.start_unix_server(impostor, tmp_path / "s"), EngineConnections() as connections:
            near = served.connect(connections, socket=str(tmp_path / "s"))
            return (await near.generate(turn())).token_ids

    assert on_server(body, has_http=True) == [7]
    assert seen == [b""]


def test_a_server_that_never_answers_costs_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_socket, "CONNECT_TIMEOUT_S", 0.05)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def body(_: ScriptedEngine, served: Served) -> list[int]:
        async with await asyncio.start_unix_server(silent, tmp_path / "s"), EngineConnections() as connections:
            near = served.connect(connections, socket=str(tmp_path / "s"))
            return (await near.generate(turn())).token_ids

    assert on_server(body, has_http=True) == [7]


def test_the_sockets_directory_is_its_owners_alone_and_goes_with_the_server() -> None:
    async def body(_: ScriptedEngine, served: Served) -> Path:
        directory = Path(served.socket).parent
        assert directory.stat().st_mode & 0o777 == 0o700
        return directory

    assert not on_server(body).exists()


def test_an_engine_whose_directory_is_too_deep_for_sockets_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def body(_: ScriptedEngine, served: Served) -> str:
        return served.socket

    assert on_server(body) == ""
    assert not list(deep.iterdir())
