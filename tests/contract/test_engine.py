"""The contract of every InferenceEngine, on the embedded and the simulated engine, in this process and over HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from hpcrl.config.recipe import TinyModel
from hpcrl.engines.base import (
    Completion,
    CompletionChunk,
    ExactText,
    GenerateRequest,
    InferenceEngine,
    JsonValue,
    OutputPart,
    OutputStructure,
    PartChoice,
    join_chunks,
)
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.engines.http import RemoteEngine, make_client_session, make_kv_fetcher, serve_over_http
from hpcrl.engines.node_socket import EngineConnections, serve_over_socket
from hpcrl.engines.sim.engine import SimEngine, SimSettings
from hpcrl.errors import EngineError
from hpcrl.hardware.cost_model import ModelShape, estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.models.tiny import MARKS, make_tiny_model
from hpcrl.system.network import current_node
from hpcrl.testing.memory import MemoryStore
from tests.support.endpoints import make_endpoint
from tests.support.structures import read_text

Opened = Callable[[], AbstractAsyncContextManager[InferenceEngine]]
PROMPT = [2, 45, 78, 5, 36, 3]
PLACES = 8
"""The most requests that each of these engines runs at once."""
CONTEXT = 2048
"""The context length of each of these engines."""
LONG = 2000
"""The number of tokens of a turn in which something is to happen midway."""
TRIES = 5
"""The number of attempts: on a shared machine a turn may be over too early."""


@asynccontextmanager
async def in_process(model: Any) -> AsyncIterator[InferenceEngine]:
    async with EmbeddedEngine(model, store=MemoryStore(), max_batch=PLACES) as engine:
        yield engine


@asynccontextmanager
async def over_http(model: Any) -> AsyncIterator[InferenceEngine]:
    async with (
        make_client_session() as session,
        EmbeddedEngine(model, store=MemoryStore(), max_batch=PLACES, fetch_kv=make_kv_fetcher(session)) as engine,
    ):
        url, runner = await serve_over_http(engine, host="127.0.0.1", token="secret", max_load_age_s=0.0)
        yield RemoteEngine(make_endpoint(url=url, token="secret"), session)
        await runner.cleanup()


@asynccontextmanager
async def over_socket(model: Any) -> AsyncIterator[InferenceEngine]:
    async with (
        EngineConnections() as connections,
        make_client_session() as session,
        EmbeddedEngine(model, store=MemoryStore(), max_batch=PLACES, fetch_kv=make_kv_fetcher(session)) as engine,
        serve_over_socket(engine, token="secret") as socket,
    ):
        url, runner = await serve_over_http(engine, host="127.0.0.1", token="secret", max_load_age_s=0.0)
        yield connections.connect(make_endpoint(url=url, token="secret", node=current_node(), socket=socket))
        await runner.cleanup()


SIM = SimSettings(vocabulary=100, context_length=CONTEXT, max_batch=PLACES)
SIM_PACE = estimate_speed(
    GPU_CATALOGUE["h20"], shape=ModelShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, num_dense=90000)
)


@asynccontextmanager
async def simulated(_: Any) -> AsyncIterator[InferenceEngine]:
    async with SimEngine(SIM_PACE, settings=SIM, store=MemoryStore()) as engine:
        yield engine


@asynccontextmanager
async def simulated_over_http(_: Any) -> AsyncIterator[InferenceEngine]:
    async with (
        make_client_session() as session,
        SimEngine(SIM_PACE, settings=SIM, store=MemoryStore(), fetch_kv=make_kv_fetcher(session)) as engine,
    ):
        url, runner = await serve_over_http(engine, host="127.0.0.1", token="secret", max_load_age_s=0.0)
        yield RemoteEngine(make_endpoint(url=url, token="secret"), session)
        await runner.cleanup()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("engine") / "model"
    make_tiny_model(directory, TinyModel(context_length=CONTEXT), seed=0)
    return load_model(directory, device="cpu")


@pytest.fixture(params=[in_process, over_http, over_socket, simulated, simulated_over_http])
def opened(request: pytest.FixtureRequest, model: Any) -> Opened:
    return lambda: request.param(model)


@pytest.fixture(params=[in_process, over_http])
def honouring(request: pytest.FixtureRequest, model: Any) -> Opened:
    """Return the engines that hold answers to their structures; the simulated one only checks the structures."""
    return lambda: request.param(model)


def ask(request_id: str = "r", **changes: Any) -> GenerateRequest:
    request = GenerateRequest(request_id=request_id, token_ids=PROMPT, max_new_tokens=6, needs_seed=True)
    return msgspec.structs.replace(request, **changes)


def on(opened: Opened, body: Callable[[InferenceEngine], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with opened() as engine:
            return await body(engine)

    return asyncio.run(run())


async def num_made(engine: InferenceEngine) -> int:
    return (await engine.load_figures()).num_generated_tokens


async def until_running(engine: InferenceEngine, *, since: int = 0) -> None:
    """Wait until the engine has generated more than `since` tokens."""
    while await num_made(engine) <= since:
        await asyncio.sleep(0.001)


def test_a_completion_has_one_logprob_and_one_version_per_token(opened: Opened) -> None:
    answer = on(opened, lambda engine: engine.generate(ask()))
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == 6
    assert answer.finish_reason == "length"
    assert set(answer.versions) == {0}
    assert max(answer.logprobs) <= 0


def test_the_same_seed_gives_the_same_tokens_and_another_seed_gives_others(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> list[list[int]]:
        answers = [await engine.generate(ask(seed=seed, max_new_tokens=20)) for seed in (7, 7, 8)]
        return [answer.token_ids for answer in answers]

    first, again, other = on(opened, body)
    assert first == again != other


def test_generation_ends_with_the_first_stop_token(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> Any:
        free = await engine.generate(ask(max_new_tokens=20))
        stop = free.token_ids[5]
        return free, stop, await engine.generate(ask(max_new_tokens=20, stop_token_ids=[stop]))

    free, stop, stopped = on(opened, body)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_a_request_longer_than_the_context_is_refused_with_the_numbers(opened: Opened) -> None:
    with pytest.raises(EngineError, match=r"2000 prompt tokens and 49 new ones are 2049.* context is 2048"):
        on(opened, lambda engine: engine.generate(ask(token_ids=[5] * 2000, max_new_tokens=49)))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": [100]}, r"0\.\.99"),
        ({"token_ids": [-1]}, r"0\.\.99"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(opened: Opened, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        on(opened, lambda engine: engine.generate(ask(**changes)))


def test_a_request_id_in_use_is_refused(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> tuple[Completion, Completion | BaseException]:
        for _ in range(TRIES):
            before = await num_made(engine)
            turn = asyncio.create_task(engine.generate(ask(max_new_tokens=LONG)))
            await until_running(engine, since=before)
            [second] = await asyncio.gather(engine.generate(ask()), return_exceptions=True)
            await engine.abort("r")
            first = await turn
            if first.finish_reason == "aborted":
                break
        return first, second

    first, second = on(opened, body)
    assert first.finish_reason == "aborted", "it ran until then"
    assert isinstance(second, EngineError)
    assert "served already" in str(second)


def test_an_aborted_request_returns_its_tokens_so_far(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> Completion:
        for _ in range(TRIES):
            before = await num_made(engine)
            turn = asyncio.create_task(engine.generate(ask(max_new_tokens=LONG)))
            await until_running(engine, since=before)
            await engine.abort("r")
            answer = await turn
            if len(answer.token_ids) < LONG:
                break
        return answer

    answer = on(opened, body)
    assert answer.finish_reason == "aborted"
    assert 0 < len(answer.token_ids) == len(answer.logprobs) < LONG


def test_aborting_an_unknown_request_does_nothing(opened: Opened) -> None:
    on(opened, lambda engine: engine.abort("unknown"))


async def check_request_is_aborted(
    engine: InferenceEngine, leave: Callable[[InferenceEngine], Awaitable[None]]
) -> None:
    """Check that a long turn ends early after `leave`."""
    for _ in range(TRIES):
        before = await num_made(engine)
        await leave(engine)
        while (await engine.load_figures()).num_running:
            await asyncio.sleep(0.001)
        if (made := await num_made(engine) - before) < LONG:
            break
    assert 0 < made < LONG


def test_the_request_of_a_caller_that_is_cancelled_is_aborted(opened: Opened) -> None:
    async def go_away(engine: InferenceEngine) -> None:
        before = await num_made(engine)
        lost = asyncio.create_task(engine.generate(ask("lost", max_new_tokens=LONG)))
        await until_running(engine, since=before)
        lost.cancel()

    on(opened, lambda engine: check_request_is_aborted(engine, go_away))


def test_more_requests_than_the_batch_holds_are_all_answered(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> list[int]:
        answers = await asyncio.gather(
            *[engine.generate(ask(f"r{n}", seed=n, max_new_tokens=1 + n)) for n in range(30)]
        )
        return [len(answer.token_ids) for answer in answers]

    assert on(opened, body) == [1 + n for n in range(30)]


def test_decoding_from_handed_over_kv_gives_the_tokens_of_one_engine(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> Any:
        alone = await engine.generate(ask("alone", temperature=0.0, max_new_tokens=20))
        handle = await engine.prefill(ask("prefill", temperature=0.0))
        assert handle.num_tokens == len(PROMPT) - 1
        return alone, await engine.generate(ask("decode", temperature=0.0, max_new_tokens=20, kv=handle))

    alone, decoded = on(opened, body)
    assert decoded.remote_prefill
    assert not alone.remote_prefill
    assert decoded.token_ids == alone.token_ids
    assert decoded.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_handle_answers_once_and_then_the_prompt_is_recomputed(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> Any:
        handle = await engine.prefill(ask("prefill"))
        return [await engine.generate(ask(f"decode-{n}", kv=handle)) for n in range(2)]

    first, second = on(opened, body)
    assert (first.remote_prefill, second.remote_prefill) == (True, False)
    assert first.token_ids == second.token_ids


def test_kv_of_another_version_or_of_another_prompt_is_not_used(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> Any:
        alone = await engine.generate(ask("alone"))
        stale = msgspec.structs.replace(await engine.prefill(ask("p")), version=1)
        foreign = await engine.prefill(ask("q", token_ids=[2, 50, 51, 52, 53, 3]))
        return alone, [await engine.generate(ask(f"d{n}", kv=kv)) for n, kv in enumerate((stale, foreign))]

    alone, others = on(opened, body)
    for answer in others:
        assert not answer.remote_prefill
        assert answer.token_ids == alone.token_ids


def test_an_idle_engine_reports_no_requests(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> Any:
        await engine.generate(ask())
        return await engine.load_figures()

    figures = on(opened, body)
    assert (figures.version, figures.num_running, figures.num_waiting, figures.num_generated_tokens) == (0, 0, 0, 6)


def test_a_busy_engine_reports_how_much_kv_its_requests_hold(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> int:
        turn = asyncio.create_task(engine.generate(ask(max_new_tokens=LONG)))
        held = 0
        while not (held or turn.done()):
            held = (await engine.load_figures()).running_tokens
            await asyncio.sleep(0.001)
        await engine.abort("r")
        await turn
        return held

    assert on(opened, body) > 0


async def streamed(engine: InferenceEngine, request: GenerateRequest) -> list[CompletionChunk]:
    return [chunk async for chunk in engine.stream(request)]


def test_a_stream_has_the_same_answer_in_chunks(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> tuple[Completion, list[CompletionChunk]]:
        whole = await engine.generate(ask("whole", seed=3, max_new_tokens=60))
        return whole, await streamed(engine, ask("streamed", seed=3, max_new_tokens=60))

    whole, chunks = on(opened, body)
    assert len(chunks) > 1
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    for chunk in chunks:
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
    assert join_chunks(chunks).token_ids == whole.token_ids
    assert join_chunks(chunks).versions == whole.versions
    assert join_chunks(chunks).logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_a_stream_ends_with_the_stop_token(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> tuple[Completion, list[CompletionChunk]]:
        free = await engine.generate(ask("free", max_new_tokens=20))
        return free, await streamed(engine, ask("streamed", max_new_tokens=20, stop_token_ids=[free.token_ids[5]]))

    free, chunks = on(opened, body)
    assert chunks[-1].finish_reason == "stop"
    assert join_chunks(chunks).token_ids == free.token_ids[: free.token_ids.index(free.token_ids[5]) + 1]


def test_a_request_whose_stream_is_closed_midway_is_aborted(opened: Opened) -> None:
    async def close_early(engine: InferenceEngine) -> None:
        async with aclosing(engine.stream(ask(max_new_tokens=LONG))) as chunks:
            async for _ in chunks:
                break

    async def body(engine: InferenceEngine) -> None:
        await check_request_is_aborted(engine, close_early)
        assert len((await engine.generate(ask(max_new_tokens=4))).token_ids) == 4  # the name is free again

    on(opened, body)


def test_a_stream_that_is_aborted_ends_with_that_reason(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> list[CompletionChunk]:
        for _ in range(TRIES):
            chunks = []
            async for chunk in engine.stream(ask(max_new_tokens=LONG)):
                chunks.append(chunk)
                if len(chunks) == 1:
                    await engine.abort("r")
            if len(join_chunks(chunks).token_ids) < LONG:
                break
        return chunks

    chunks = on(opened, body)
    assert chunks[-1].finish_reason == "aborted"
    assert 0 < len(join_chunks(chunks).token_ids) < LONG


def test_a_stream_of_a_request_that_makes_no_sense_is_refused(opened: Opened) -> None:
    with pytest.raises(EngineError, match="2000 prompt tokens and 49 new ones"):
        on(opened, lambda engine: streamed(engine, ask(token_ids=[5] * 2000, max_new_tokens=49)))


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}])
def test_where_one_token_is_left_to_draw_from_it_is_the_likeliest(opened: Opened, narrow: dict[str, Any]) -> None:
    async def body(engine: InferenceEngine) -> list[list[int]]:
        greedy = await engine.generate(ask("greedy", temperature=0.0, max_new_tokens=12))
        drawn = await engine.generate(ask("drawn", seed=5, max_new_tokens=12, **narrow))
        return [greedy.token_ids, drawn.token_ids]

    greedy, drawn = on(opened, body)
    assert drawn == greedy


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}])
def test_a_choice_among_no_tokens_is_refused(opened: Opened, wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="top_p is"):
        on(opened, lambda engine: engine.generate(ask(**wrong)))


def test_where_all_places_are_taken_the_smaller_number_goes_first(opened: Opened) -> None:
    async def body(engine: InferenceEngine) -> list[str]:
        for attempt in range(20):
            ended, all_waited = await _order(engine, name=f"{attempt}")
            if all_waited:
                return ended
        raise AssertionError("the engine was never full for long enough to send more requests")

    assert on(opened, body) == ["urgent", "middle", "patient"]


async def _order(engine: InferenceEngine, *, name: str) -> tuple[list[str], bool]:
    """Send three requests in the wrong order to a full engine; return which was answered first, and if it was full."""
    ended: list[str] = []

    async def turn(kind: str, priority: int, num: int) -> None:
        await engine.generate(ask(f"{name}-{kind}", priority=priority, max_new_tokens=num))
        ended.append(kind)

    async def all_at_once(turns: Iterable[Any]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(each) for each in turns]

    fill = await all_at_once(turn(f"long-{n}", 0, 260 + 30 * n) for n in range(PLACES))
    while (await engine.load_figures()).num_running < PLACES and not ended:
        await asyncio.sleep(0.001)
    late = await all_at_once(
        turn(kind, priority, 20) for kind, priority in (("patient", 9), ("middle", 4), ("urgent", 1))
    )
    while (await engine.load_figures()).num_waiting < len(late) and not ended:
        await asyncio.sleep(0.001)
    was_full = not ended
    await asyncio.gather(*fill, *late)
    return [kind for kind in ended if not kind.startswith("long")], was_full


def test_an_engine_reports_how_many_requests_it_runs_at_once(opened: Opened) -> None:
    assert on(opened, lambda engine: engine.load_figures()).num_places == PLACES


# ---- structured answers

STOP = MARKS.index("<eos>")
ANY = {"type": "object"}
CALL = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["add", "divide"]},
        "sure": {"type": "boolean"},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["tool", "sure"],
    "additionalProperties": False,
}


def structured(*parts: OutputPart, request_id: str = "r", **changes: Any) -> GenerateRequest:
    changes = {"max_new_tokens": 500, "stop_token_ids": [STOP]} | changes
    return ask(request_id, structure=OutputStructure(parts=list(parts)), **changes)


def is_call(text: str) -> bool:
    """Return whether a text is JSON of the schema."""
    call = json.loads(text)
    return (
        call["tool"] in ("add", "divide")
        and isinstance(call["sure"], bool)
        and all(0 <= number <= 99 for number in call.get("numbers", []))
        and call.keys() <= {"tool", "sure", "numbers"}
    )


def test_a_structured_answer_is_json_of_its_schema(honouring: Opened) -> None:
    async def body(engine: InferenceEngine) -> list[Completion]:
        asked = [structured(JsonValue(schema=CALL), request_id=f"r{seed}", seed=seed) for seed in range(4)]
        return await asyncio.gather(*(engine.generate(request) for request in asked))

    for answer in on(honouring, body):
        assert answer.finish_reason == "stop"
        assert is_call(read_text(answer.token_ids).removesuffix("<eos>"))


def test_a_structured_answer_may_be_one_of_several_repeated_calls(honouring: Opened) -> None:
    calls = [[ExactText(text=f"<{name}>"), JsonValue(schema=CALL), ExactText(text=f"</{name}>")] for name in "ab"]
    choice = PartChoice(alternatives=calls, may_repeat=True, separator="\n; ")
    answer = on(honouring, lambda engine: engine.generate(structured(choice, max_new_tokens=1500)))
    found = re.findall(r"(?:^|\n; )<(a|b)>(.*?)</\1>", text := read_text(answer.token_ids), re.DOTALL)
    assert answer.finish_reason == "stop"
    assert found
    assert all(is_call(call) for _, call in found)
    assert sum(len(call) + len("<a></a>") for _, call in found) + 3 * (len(found) - 1) == len(text) - len("<eos>")


def test_a_structured_answer_is_cut_at_its_maximal_length(honouring: Opened) -> None:
    async def body(engine: InferenceEngine) -> tuple[Completion, list[CompletionChunk]]:
        whole = await engine.generate(structured(JsonValue(schema=CALL), seed=2))
        return whole, await streamed(engine, structured(JsonValue(schema=CALL), seed=2, max_new_tokens=9))

    whole, chunks = on(honouring, body)
    assert chunks[-1].finish_reason == "length"
    assert join_chunks(chunks).token_ids == whole.token_ids[:9]


def test_a_structured_answer_continues_what_another_engine_left_unfinished(honouring: Opened) -> None:
    async def body(engine: InferenceEngine) -> list[str]:
        whole = (await engine.generate(structured(JsonValue(schema=CALL)))).token_ids
        texts = []
        for num in (1, 9, len(whole) - 1):
            rest = structured(JsonValue(schema=CALL), token_ids=PROMPT + whole[:num], num_answered=num, seed=num)
            texts.append(read_text(whole[:num] + (await engine.generate(rest)).token_ids))
        return texts

    assert all(is_call(text.removesuffix("<eos>")) for text in on(honouring, body))


@pytest.mark.parametrize(
    ("schema", "changes", "complaint"),
    [
        ({"not": {}}, {}, "Unimplemented keys.*not"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, {}, "minimum .3. is greater than maximum .1."),
        ({"$ref": "#"}, {}, "no text matches it"),
        ({"enum": ["x" * 300_000]}, {}, "300.* bytes of JSON"),
        (ANY, {"stop_token_ids": []}, "no stop_token_ids"),
        (ANY, {"num_answered": len(PROMPT)}, "num_answered is 6 of 6"),
    ],
)
def test_a_structure_that_cannot_be_served_is_refused_in_one_line_and_others_go_on(
    opened: Opened, schema: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    async def body(engine: InferenceEngine) -> Any:
        bad = structured(JsonValue(schema=schema), request_id="bad", **changes)
        return await asyncio.gather(engine.generate(bad), engine.generate(ask()), return_exceptions=True)

    error, answer = on(opened, body)
    assert isinstance(error, EngineError)
    assert re.search(complaint, str(error))
    assert "\n" not in str(error)
    assert len(answer.token_ids) == 6
