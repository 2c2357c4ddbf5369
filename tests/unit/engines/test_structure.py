"""Structured answers: what is refused, and tokens, log-probabilities and interruptions of the embedded engine."""

import asyncio
import datetime
import json
import pathlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pydantic
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hpcrl.campaign_dir.endpoints import EndpointReader, announce_endpoint
from hpcrl.engines.base import (
    Completion,
    CompletionChunk,
    ExactText,
    FreeText,
    GenerateRequest,
    JsonValue,
    OutputPart,
    OutputStructure,
    PartChoice,
    convert_to_chunk,
    join_chunks,
)
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.engines.embedded.grammar import AnswerMatcher, GrammarCompiler
from hpcrl.engines.http import RemoteEngine, make_client_session, serve_over_http
from hpcrl.engines.structure import check_structure, read_answered, read_token_names, relax_structure, write_grammar
from hpcrl.errors import EngineError, EngineRequestError
from hpcrl.models.tiny import MARKS
from hpcrl.rollout.agents.structures import CALL_WRITERS
from hpcrl.rollout.routing.router import Router
from hpcrl.rollout.turn import generate_turn, stream_turn
from hpcrl.testing.memory import MemoryStore
from hpcrl.weights.model_update import collect_parameters
from hpcrl.weights.versions import WeightVersion
from tests.support.endpoints import make_endpoint
from tests.support.structures import SMALL, TEXTS, encode, read_text, score_masked

STOP = MARKS.index("<eos>")
ANY = {"type": "object"}
PAIRS = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 25, "maxItems": 25}
"""A schema whose answers are long."""


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return load_model(tiny_model_dir, device="cpu")


def structure(*parts: OutputPart) -> OutputStructure:
    return OutputStructure(parts=list(parts))


def ask(request_id: str = "r", *, wanted: OutputStructure | None = SMALL, **changes: Any) -> GenerateRequest:
    request = GenerateRequest(
        request_id=request_id,
        token_ids=[2, 45, 78, 5, 36, 3],
        max_new_tokens=500,
        stop_token_ids=[STOP],
        structure=wanted,
    )
    return msgspec.structs.replace(request, **changes)


def on(engine: EmbeddedEngine, body: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with engine:
            return await body()

    return asyncio.run(run())


# ---- the embedded engine


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_of_the_tokens_that_the_structure_allows(model: Any, temperature: float) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore())
    requests = [ask(f"r{seed}", seed=seed, temperature=temperature, top_logprobs=3) for seed in range(12)]

    async def body() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    answers = on(engine, body)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    for request, answer in zip(requests, answers, strict=True):
        assert read_text(answer.token_ids) in [text + "<eos>" for text in TEXTS]
        expected = score_masked(model, request.token_ids, answer.token_ids, stop=STOP, temperature=temperature)
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        assert [score == 0 for score in answer.logprobs] == [score == 0 for score in expected]  # exactly: not trained
        assert set(answer.top[0]) == {*encode("y"), *encode("n")}


def test_requests_without_a_structure_are_generated_as_if_alone(model: Any) -> None:
    free = ask("free", wanted=None, max_new_tokens=30)

    def generate(*requests: GenerateRequest) -> Any:
        engine = EmbeddedEngine(model, store=MemoryStore())

        async def body() -> list[Completion]:
            return await asyncio.gather(*(engine.generate(request) for request in requests))

        return on(engine, body)

    assert generate(ask("structured"), free)[1].token_ids == generate(free)[0].token_ids


def test_new_weights_in_mid_answer_keep_the_state_of_its_structure(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir, device="cpu")
    store = MemoryStore()
    newer = {name: tensor * 1.5 for name, tensor in collect_parameters(model).items()}
    store.publish(newer, WeightVersion(version=4, step=1))
    engine = EmbeddedEngine(model, store=store)

    async def body() -> Completion:
        answer = asyncio.create_task(engine.generate(ask(wanted=structure(JsonValue(schema=PAIRS)))))
        while (await engine.load_figures()).num_generated_tokens < 20:
            await asyncio.sleep(0)
        await engine.load_version(4)
        return await answer

    answer = on(engine, body)
    assert set(answer.versions) == {0, 4}
    assert len(json.loads(read_text(answer.token_ids).removesuffix("<eos>"))) == 25


class InterruptedEngine:
    """An engine that is interrupted after 50 tokens of each request."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> Completion:
        num = min(50, request.max_new_tokens)
        part = await self._engine.generate(msgspec.structs.replace(request, max_new_tokens=num))
        return msgspec.structs.replace(part, finish_reason="stop" if part.finish_reason == "stop" else "aborted")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        yield convert_to_chunk(await self.generate(request))


@pytest.mark.parametrize("streams", [False, True])
def test_a_structured_turn_that_engines_interrupt_continues_where_it_was(model: Any, streams: bool) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore())
    turn = ask(wanted=structure(JsonValue(schema=PAIRS)), max_new_tokens=400)

    async def body() -> Completion:
        interrupted = InterruptedEngine(engine)
        if not streams:
            return await generate_turn(interrupted, turn)
        return join_chunks([chunk async for chunk in stream_turn(interrupted, turn)])

    answer = on(engine, body)
    assert len(answer.token_ids) > 100
    assert len(json.loads(read_text(answer.token_ids).removesuffix("<eos>"))) == 25


def test_a_structure_that_the_tokenizer_cannot_write_fails_alone(model: Any) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore())
    wanted = structure(PartChoice(alternatives=[[JsonValue(schema={"enum": ["\u4e2d"]})]]))  # the tiny model has ASCII

    async def body() -> Any:
        bad = engine.generate(ask("bad", wanted=wanted))
        return await asyncio.gather(bad, engine.generate(ask("good")), return_exceptions=True)

    error, answer = on(engine, body)
    assert isinstance(error, EngineRequestError)
    assert "the structure of the answer cannot be held to" in str(error)
    assert "\n" not in str(error)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("schema", [{"const": "\u00fc"}, {"type": "object", "required": ["a\u00e9\U0001f600"]}])
@pytest.mark.parametrize("streams", [False, True])
def test_a_structure_that_the_tokenizer_cannot_write_is_not_a_failure_of_the_worker(
    model: Any, tmp_path: Path, schema: dict[str, Any], streams: bool
) -> None:
    """The router refuses the turn at once, over HTTP too, also where its first tokens can be written."""
    wanted = structure(JsonValue(schema=schema | {"properties": {key: {} for key in schema.get("required", [])}}))

    async def run() -> tuple[int, dict[str, int]]:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(EmbeddedEngine(model, store=MemoryStore()))
            url, runner = await serve_over_http(engine, host="127.0.0.1", token="t")
            stack.push_async_callback(runner.cleanup)
            announce_endpoint(tmp_path, make_endpoint(url=url))
            session = await stack.enter_async_context(make_client_session())
            endpoints = EndpointReader(tmp_path, job=0)
            router = Router(endpoints, connect=lambda endpoint: RemoteEngine(endpoint, session), seed=0)
            await stack.enter_async_context(router)
            chunks = []

            async def generate() -> None:
                if not streams:
                    await generate_turn(router, ask(wanted=wanted))
                async for chunk in stream_turn(router, ask(wanted=wanted)):
                    chunks.append(chunk)

            with pytest.raises(EngineRequestError, match="the structure of the answer cannot be held to"):
                await generate()
            return len(chunks), dict(router.reasons)

    num_chunks, reasons = asyncio.run(run())
    assert (num_chunks > 0) == streams
    assert reasons["request refused"] == 1
    assert "decode failed" not in reasons


# ---- tokens


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer with a token for each byte, and marks that are special and that are not."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("[TOOL_CALLS]")])
    tokenizer.add_tokens([AddedToken("</think>"), AddedToken("  ")])
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


class TextCheck:
    """A structure and a tokenizer: which texts are answers."""

    def __init__(self, tokenizer: Path, *parts: OutputPart) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._stop = self._tokenizer.token_to_id("<|im_end|>")
        self._request = ask(wanted=structure(*parts), stop_token_ids=[self._stop])
        self._compiler = GrammarCompiler(tokenizer, vocabulary=self._tokenizer.get_vocab_size())

    def start(self) -> AnswerMatcher:
        return self._compiler.compile(self._request)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def accepts(self, text: str) -> bool:
        """Return whether each token of the text and of the end is allowed after those before it."""
        matcher = self.start()
        for token in [*self.encode(text), self._stop]:
            if not matcher.find_allowed()[token]:
                return False
            matcher.accept(token)
        return True


THINKS = FreeText(until="</think>")
CALLS = PartChoice(
    alternatives=[
        [ExactText(text='[TOOL_CALLS]{"name": "a", "arguments": '), JsonValue(schema=ANY), ExactText(text="}")],
        [ExactText(text="<f=b>"), FreeText(until="</f>")],
    ],
    may_repeat=True,
    separator="\n",
)


@pytest.mark.parametrize(
    ("parts", "text", "fits"),
    [
        ([JsonValue(schema=ANY)], '{"h\u00e9": [1, {"\U0001f600": null}]}', True),
        ([JsonValue(schema=ANY)], '{"a": 1', False),
        ([JsonValue(schema=ANY)], '{"a": </think>}', False),
        ([THINKS, ExactText(text="\n"), JsonValue(schema=ANY)], 'h\u00e9 {[TOOL_CALLS]</think>\n{"a": 1}', True),
        ([THINKS, JsonValue(schema=ANY)], '{"a": 1}', False),
        ([CALLS], '[TOOL_CALLS]{"name": "a", "arguments": {"x": 2}}\n<f=b>any <text>\n</f>', True),
        ([CALLS], "", False),
        ([CALLS], '[TOOL_CALLS]{"name": "c", "arguments": {}}', False),
        ([PartChoice(alternatives=[[ExactText(text="no ")], []]), ExactText(text="ok")], "ok", True),
        ([PartChoice(alternatives=[[CALLS], [JsonValue(schema={"type": "array"})]])], "[1, 2]", True),
        ([PartChoice(alternatives=[[ExactText(text="no ")], []]), ExactText(text="ok")], "no ok", True),
        ([ExactText(text='a  "b\\\n\t\u00e9</x>/')], 'a  "b\\\n\t\u00e9</x>/', True),
    ],
)
def test_a_text_is_an_answer_if_it_fits_the_parts(
    byte_tokenizer: Path, parts: list[OutputPart], text: str, fits: bool
) -> None:
    assert TextCheck(byte_tokenizer, *parts).accepts(text) == fits


def test_a_token_that_is_half_a_character_is_allowed_where_the_character_is(byte_tokenizer: Path) -> None:
    check = TextCheck(byte_tokenizer, JsonValue(schema={"enum": ["\u00e9"]}))
    quote, first, second = check.encode('"\u00e9')
    matcher = check.start()
    matcher.accept(quote)
    assert matcher.find_allowed().nonzero().flatten().tolist() == [first]
    matcher.accept(first)
    assert matcher.find_allowed().nonzero().flatten().tolist() == [second]


def test_reasoning_may_hold_any_token_but_stop_tokens(byte_tokenizer: Path) -> None:
    allowed = TextCheck(byte_tokenizer, THINKS, JsonValue(schema=ANY)).start().find_allowed()
    [stop] = (~allowed).nonzero().flatten().tolist()
    assert stop == read_token_names(byte_tokenizer)["<|im_end|>"]


def test_a_grammar_names_the_tokens_that_were_answered_before() -> None:
    grammar = write_grammar(SMALL, token_names={}, stop_token_ids=[5], answered=[7, 300])
    assert read_answered(grammar) == [7, 300]
    assert read_answered(write_grammar(SMALL, token_names={}, stop_token_ids=[5])) == []
    assert read_answered('start: "answered: 1,2"\n') == []


# ---- what is refused


def nest(schema: dict[str, Any], *, levels: int) -> dict[str, Any]:
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([], "no parts"),
        ([PartChoice(alternatives=[])], "0 alternatives"),
        ([PartChoice(alternatives=[[]] * 257)], "257 alternatives"),
        ([PartChoice(alternatives=[[], [ExactText(text="a")]], may_repeat=True)], "cannot be repeated"),
        ([FreeText(until="")], "must be some text"),
        ([PartChoice(alternatives=[[THINKS], []]), JsonValue(schema=ANY)], "starts with free text"),
        ([PartChoice(alternatives=[[ExactText(text='{"name": "f"}')], []]), JsonValue(schema=ANY)], "the text '{'"),
        ([JsonValue(schema={"enum": ["x" * 10**6]})], "1000.* bytes of JSON: at most 262144"),
        ([JsonValue(schema=nest(ANY, levels=5000))], "more than 64 deep"),
        ([JsonValue(schema={"type": "array", "minItems": 10**9})], "minItems 1000000000: at most 10000"),
        ([JsonValue(schema={"enum": [{"pattern": str(number)} for number in range(257)]})], "257 different patterns"),
        ([JsonValue(schema={"$ref": "#"})], "no text matches it"),
        ([JsonValue(schema={"$ref": "https://example.com/schema"})], "not present"),
        ([JsonValue(schema={"type": "array", "uniqueItems": True})], "uniqueItems"),
        ([JsonValue(schema={"type": "blob"})], "blob"),
        ([JsonValue(schema={"enum": ["\ud800"]})], "half a character"),
        ([JsonValue(schema={"type": "integer", "minimum": 10**400})], "number out of range"),
        ([JsonValue(schema={"type": "number", "minimum": float("nan")})], "expected value"),
        ([JsonValue(schema={"type": "string", "pattern": "("})], "regex parse error: .*unclosed group"),
        ([JsonValue(schema={"x-guidance": {"lenient": True}, "not": {}})], "not"),
    ],
)
def test_a_structure_that_no_engine_can_hold_an_answer_to_is_refused_in_one_line(
    parts: list[OutputPart], complaint: str
) -> None:
    with pytest.raises(EngineError, match=complaint) as raised:
        check_structure(structure(*parts))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"},
        {"oneOf": [{"type": "integer"}, {"type": "null"}], "title": "a number", "discriminator": {}},
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 10**9},
        nest(ANY, levels=25),
        {"type": "object", "properties": {f"p{n}": {"type": "string", "description": "x" * 80} for n in range(999)}},
    ],
)
def test_a_schema_may_be_recursive_large_or_have_annotations(schema: dict[str, Any]) -> None:
    check_structure(structure(JsonValue(schema=schema)))


@pytest.mark.parametrize("family", CALL_WRITERS)
def test_a_call_in_the_form_of_a_family_may_be_an_alternative_to_json(family: str) -> None:
    tool = {
        "name": "f",
        "parameters": {"$defs": {"a": ANY}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}},
    }
    calls = CALL_WRITERS[family].list_parts([tool], may_repeat=True)
    check_structure(structure(PartChoice(alternatives=[calls, [JsonValue(schema=ANY)]])))


@pytest.mark.parametrize(("text", "schema"), [("{", {"type": "object"}), ("[", {"type": "array"}), ("[", {})])
def test_a_text_that_starts_as_the_json_may_is_not_an_alternative_to_it(text: str, schema: dict[str, Any]) -> None:
    alternatives = [[ExactText(text=f"{text}x")], [JsonValue(schema=schema)]]
    with pytest.raises(EngineError, match=rf"starts with JSON and another with the text '\{text}'"):
        check_structure(structure(PartChoice(alternatives=alternatives)))


@pytest.mark.parametrize("family", CALL_WRITERS)
def test_the_arguments_of_a_call_may_refer_to_definitions_inside_a_list(family: str) -> None:
    items = {"type": "array", "items": {"$ref": "#/$defs/a"}}
    tool = {"name": "f", "parameters": {"$defs": {"a": ANY}, "type": "object", "properties": {"x": items}}}
    check_structure(structure(*CALL_WRITERS[family].list_parts([tool], may_repeat=False)))


def test_a_body_nested_deeper_than_the_stack_is_a_bad_request(model: Any) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore())
    schema = '{"a":' * 50_000 + "1" + "}" * 50_000
    request = msgspec.json.encode(ask(wanted=structure(JsonValue(schema={"a": 1}))))
    data = request.replace(b'{"a":1}', schema.encode())

    async def body() -> tuple[int, Any]:
        url, runner = await serve_over_http(engine, host="127.0.0.1", token="t")
        async with (
            aiohttp.ClientSession(headers={"Authorization": "Bearer t"}) as client,
            client.post(f"{url}/generate", data=data) as answer,
        ):
            found = answer.status, await answer.json()
        await runner.cleanup()
        return found

    status, answer = on(engine, body)
    assert status == 400
    assert "not a valid GenerateRequest" in answer["error"]


OPTIONAL = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("keywords", "dropped"),
    [
        ({"format": "path"}, "format 'path'"),
        ({"format": "password", "minLength": 2}, "format 'password'"),
        ({"format": "date"}, None),
        ({"pattern": "^(?!a)b"}, "pattern '^(?!a)b'"),
        ({"pattern": "^b+$"}, None),
        ({"type": "integer", "format": "int32"}, None),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "uniqueItems": False}, None),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({**OPTIONAL, "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({**OPTIONAL, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({**OPTIONAL, "minProperties": 1}, "minProperties"),
        ({**OPTIONAL, "not": {"required": ["q"]}}, "not"),
        (
            {**OPTIONAL, "patternProperties": {"^(?!x)": {}}, "additionalProperties": False},
            "patternProperties '^(?!x)'",
        ),
        ({"type": "object", "properties": {"contains": {"type": "string"}, "format": {"const": "path"}}}, None),
    ],
)
@pytest.mark.parametrize("place", ["whole", "optional", "referenced", "call"])
def test_what_no_answer_can_be_held_to_is_left_out_by_name(
    place: str, keywords: dict[str, Any], dropped: str | None
) -> None:
    schema = {"type": "string", **keywords}
    wholes = {
        "whole": schema,
        "optional": {"type": "object", "properties": {"x": {"anyOf": [schema, {"type": "null"}]}}},
        "referenced": {"$defs": {"it": schema}, "type": "array", "items": {"$ref": "#/$defs/it"}},
        "call": schema,
    }
    part: OutputPart = JsonValue(schema=wholes[place])
    part = PartChoice(alternatives=[[part], []]) if place == "call" else part
    relaxed, names = relax_structure(structure(part))
    assert names == ([dropped] if dropped else [])
    check_structure(relaxed)
    if dropped is None and keywords.get("uniqueItems") is None:
        assert relaxed == structure(part)


def test_if_then_else_are_left_out_together() -> None:
    schema = {**OPTIONAL, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}}
    assert relax_structure(structure(JsonValue(schema=schema))) == (
        structure(JsonValue(schema=OPTIONAL)),
        ["if", "then", "else"],
    )


def test_a_model_of_pydantic_with_odd_types_can_be_asked_for() -> None:
    class Report(pydantic.BaseModel):
        where: pathlib.Path
        secret: pydantic.SecretStr
        raw: bytes
        tags: set[str]
        at: datetime.datetime

    relaxed, names = relax_structure(structure(JsonValue(schema=Report.model_json_schema())))
    assert sorted(names) == ["format 'binary'", "format 'password'", "format 'path'", "uniqueItems"]
    check_structure(relaxed)
