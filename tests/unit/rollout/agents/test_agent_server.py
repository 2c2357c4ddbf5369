"""The server of OpenAI's API, called by the `openai` package; the model's answers are scripted."""

import asyncio
import itertools
import json
import threading

import aiohttp
import msgspec
import openai
import pytest

from hpcrl.errors import EngineAnswerError, EngineError, EngineRequestError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents import server as proxy_module
from hpcrl.rollout.agents import text_form
from hpcrl.rollout.agents.episode_record import build_record
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.spool.rows import expand_row
from hpcrl.testing.model_templates import FAMILIES, save_family
from tests.support.conversations import FACTS
from tests.support.reported_experts import check_known
from tests.support.scripted import CALL, LIMITS, QUESTION, TOOLS, opened
from tests.support.sessions import session_of

BROKEN_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "blob"}}}


def chat(client, **changed):
    return client.chat.completions.create(**({"model": "hpcrl", "messages": QUESTION} | changed))


def on(template, body, *words, **changed):
    async def run():
        async with asyncio.timeout(120), opened(template, *words, **changed) as client:
            return await body(client)

    return asyncio.run(run())


async def chunks_of(stream):
    return [chunk async for chunk in stream]


def refused(template, *words, limits=LIMITS, **asked):
    async def body(client):
        with pytest.raises(openai.APIStatusError) as caught:
            await chat(client, **asked)
        return caught.value.status_code, caught.value.body

    return on(template, body, *words, limits=limits)


def test_an_answer_is_sent_and_recorded(template):
    async def body(client):
        answer = await chat(client)
        return answer, client.session.recording.turns

    answer, turns = on(template, body, "=2<eos>")
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("=2", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert [template.decode(turn.completion.token_ids) for turn in turns] == ["=2"]


def test_an_echoed_answer_continues_from_the_generated_tokens(template):
    async def body(client):
        first = await chat(client)
        await chat(client, messages=[*QUESTION, first.choices[0].message, {"role": "user", "content": "no"}])
        return client.policy.requests

    first, second = on(template, body, "=3<eos>", "=2<eos>")
    generated = template.encode("=3<eos>")
    assert second.token_ids == [*first.token_ids, *generated, *template.encode("<user>no<agent>")]


def test_a_body_that_cannot_be_decompressed_is_refused_in_the_form_of_the_api(template):
    async def body(client):
        headers = {"Authorization": f"Bearer {client.api_key}", "Content-Encoding": "gzip"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{client.base_url}chat/completions", data=b"abcde", headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    status, answer = on(template, body)
    assert (status, answer["error"]["message"]) == (400, "the request body cannot be decompressed")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_sent_as_such_and_continued(template, stream):
    async def body(client):
        answer = await chat(client, tools=TOOLS, stream=stream)
        if stream:
            deltas = [chunk.choices[0].delta for chunk in await chunks_of(answer)]
            call = next(delta.tool_calls[0] for delta in deltas if delta.tool_calls)
            content = "".join(delta.content or "" for delta in deltas)
        else:
            assert answer.choices[0].finish_reason == "tool_calls"
            call, content = answer.choices[0].message.tool_calls[0], answer.choices[0].message.content
        echoed = {"id": call.id, "type": "function", "function": dict(call.function)}
        message = {"role": "assistant", "content": content, "tool_calls": [echoed]}
        result = {"role": "tool", "content": "2", "tool_call_id": call.id}
        await chat(client, messages=[*QUESTION, message, result], tools=TOOLS)
        return call.function, content, client.session.recording.turns

    spoken = [["so", f" {CALL[:15]}", f"{CALL[15:]}<eos>"], "ok<eos>"]
    limits = msgspec.structs.replace(LIMITS, context_length=1024)  # for the description of the tools
    function, content, turns = on(template, body, *spoken, limits=limits)
    assert (function.name, json.loads(function.arguments), content) == ("add", {"a": 1}, "so")
    assert turns[1].prompt.parent is turns[0]


def test_a_stream_has_chunks_their_end_and_the_usage(template):
    async def body(client):
        return await chunks_of(await chat(client, stream=True, stream_options={"include_usage": True}))

    *pieces, last = on(template, body, ["=", "2<eos>"])
    assert [piece.choices[0].delta.content for piece in pieces] == ["", "=", "2", None]
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.completion_tokens) == ([], 3)


def test_several_choices_are_streamed_side_by_side(template):
    async def body(client):
        chunks = await chunks_of(await chat(client, stream=True, n=2))
        return chunks, client.policy.requests

    chunks, requests = on(template, body, ["a", "b<eos>"], ["c", "d<eos>"])
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["ab", "cd"]
    assert len({request.seed for request in requests}) == len({request.request_id for request in requests}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_is_not_sent(template, stream):
    async def body(client):
        answer = await chat(client, stop=["END"], stream=stream)
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in await chunks_of(answer))
            if stream
            else answer.choices[0].message.content
        )
        (turn,) = client.session.recording.turns
        return text, template.decode(turn.completion.token_ids), turn.completion.finish_reason

    assert on(template, body, ["a E", "ND b", None]) == ("a ", "a END", "stop")


RECORDING = msgspec.structs.replace(LIMITS, records_experts=True, context_length=4096, max_turns=64)


def list_known_rows(turns):
    """Return the rows of a record, of which engines have read all tokens but the last."""
    record = build_record(turns, FACTS, reward=1.0)
    rows = [expand_row(record, number) for number in range(max(len(record.rows), 1))]
    for row in rows:
        check_known(row, [True] * (len(row) - 1) + [False])
    return rows


@pytest.mark.parametrize("stream", [False, True])
def test_experts_are_those_of_the_answer_that_a_stop_text_cut(template, stream):
    async def body(client):
        answer = await chat(client, stop=["END"], stream=stream)
        if stream:
            await chunks_of(answer)
        return client.session.recording.turns

    (turn,) = on(template, body, ["a E", "ND b", None], limits=RECORDING)
    assert len(turn.completion.experts) == 2
    assert turn.completion.experts[-1].end == len(turn.token_ids()) - 1
    (row,) = list_known_rows([turn])
    assert template.decode(row.token_ids.tolist()).endswith("a END")


def test_later_turns_of_a_conversation_report_what_is_not_known_yet(template):
    async def body(client):
        messages = list(QUESTION)
        for text in ("no", "yes", "so"):
            answer = await chat(client, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": text}]
        await chat(client, messages=[{"role": "user", "content": "other"}])
        return client.policy.requests, client.session.recording.turns

    requests, turns = on(template, body, "=3<eos>", "=2<eos>", "=4<eos>", "=5<eos>", limits=RECORDING)
    first, second, third, other = (request.experts_from for request in requests)
    assert (first, other) == (0, 0)
    assert second == len(turns[0].token_ids()) - 1
    assert third == len(turns[1].token_ids()) - 1
    assert len(list_known_rows(turns)) == 2


def test_experts_are_asked_for_only_where_they_are_recorded(template):
    async def body(client):
        await chat(client)
        return client.policy.requests[0].experts_from, client.session.recording.turns[0].completion.experts

    assert on(template, body, "=3<eos>") == (None, [])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return load_chat_template(save_family(tmp_path_factory.mktemp("qwen"), FAMILIES["Qwen2.5"]))


def play_steps(template, words, *, stop, add=""):
    """Answer the program after each step, which sends `add` after each answer; return the prompts and the turns."""

    async def body(client):
        messages, prompts = [{"role": "user", "content": "Go."}], []
        for _ in words:
            prompts.append(template.render(messages))
            message = (await chat(client, messages=messages, **stop)).choices[0].message
            observed = {"role": "user", "content": "Observation: 42"}
            messages = [*messages, {"role": "assistant", "content": message.content + add}, observed]
        return prompts, client.session.recording.turns

    return on(template, body, *words, limits=RECORDING)


@pytest.mark.parametrize(
    ("word", "stop"),
    [
        ("Action: f()\nObservation: 41", {"stop": ["Observation:"]}),
        ("Act in there", {"stop": ["n t"]}),  # it starts and ends inside a token
        ("f() and then x", {"extra_body": {"stop_token_ids": [87]}}),
    ],
)
def test_no_prompt_has_a_stop_that_the_program_neither_received_nor_sent(qwen, word, stop):
    assert qwen.decode([87]) == "x"
    prompts, turns = play_steps(qwen, [word] * 12, stop=stop)
    assert [qwen.decode_all(turn.prompt.token_ids()) for turn in turns] == prompts
    assert [turn.prompt.parent for turn in turns] == [None] * len(turns)
    trajectory = build_record(turns, FACTS, reward=1.0)
    trained = [int(token) for token in trajectory.token_ids[trajectory.loss_mask]]
    assert trained == [token for turn in turns for token in turn.completion.token_ids], "each is trained once"
    list_known_rows(turns)
    assert len(trajectory.token_ids) < 2 * len(turns[-1].token_ids()), "rows share their starts"


def test_a_stop_that_the_program_sends_back_is_in_the_conversation_as_it_was_generated(qwen):
    prompts, turns = play_steps(qwen, ["<code>\nf()\n</code>"] * 3, stop={"stop": ["</code>"]}, add="</code>")
    assert [qwen.decode_all(turn.prompt.token_ids()) for turn in turns] == prompts
    assert [turn.prompt.parent for turn in turns] == [None, *turns[:-1]]


def test_space_after_an_answer_at_which_it_stopped_starts_no_branch(qwen):
    _, turns = play_steps(qwen, ["f()\n\n"] * 3, stop={"stop": ["\n"]})
    assert [turn.prompt.parent for turn in turns] == [None, *turns[:-1]]


def test_logprobs_are_sent_token_by_token(template):
    async def body(client):
        return (await chat(client, logprobs=True, top_logprobs=2)).choices[0].logprobs.content

    first, *_ = on(template, body, "=2<eos>")
    assert (first.token, first.logprob, first.bytes) == ("=", -0.5, [ord("=")])
    assert [top.token for top in first.top_logprobs] == ["=", "<pad>"]


def test_a_plain_completion_is_answered(template):
    async def body(client):
        return await client.completions.create(model="hpcrl", prompt="1+1", max_tokens=2, logprobs=1)

    answer = on(template, body, "=2")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("=2", "length")
    assert answer.choices[0].logprobs.tokens == ["=", "2"]


def test_the_recipe_decides_how_training_data_is_sampled(template):
    async def body(client):
        await chat(client, temperature=0, top_p=0.5)
        return client.policy.requests[0], client.session.recording.turns[0]

    request, turn = on(template, body, "=2<eos>")
    assert (request.temperature, request.top_p, turn.is_trained) == (1.0, 1.0, True)
    request, turn = on(template, body, "=2<eos>", sampling="program")
    assert (request.temperature, request.top_p, turn.is_trained) == (0.0, 0.5, False)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"extra_body": {"top_k": 40.0}}, None),
        ({"extra_body": {"top_k": 0.5}}, "top_k"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 0}, None),
        ({"stop": [f"stop {number}" for number in range(17)]}, None),
    ],
)
def test_a_value_that_is_not_used_is_not_refused(template, asked, param):
    """With the recipe's sampling any number is accepted; with the program's it must be one that engines can do."""

    async def body(client):
        return (await chat(client, **asked)).choices[0].message.content

    assert on(template, body, "=2<eos>") == "=2"
    if param is None:
        assert on(template, body, "=2<eos>", sampling="program") == "=2"
    else:
        with pytest.raises(openai.BadRequestError, match=f"{param} = "):
            on(template, body, "=2<eos>", sampling="program")


@pytest.mark.parametrize(
    ("asked", "status", "code", "param"),
    [
        ({"model": "gpt"}, 404, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, 400, "context_length_exceeded", "messages"),
        ({"extra_body": {"guided_regex": "a+"}}, 400, "unsupported_parameter", "guided_regex"),
        (
            {"extra_body": {"continue_final_message": True}},
            400,
            "unsupported_parameter",
            "continue_final_message",
        ),
        ({"response_format": {"type": "grammar"}}, 400, "invalid_value", "response_format"),
        ({"extra_body": {"guided_json": "{"}}, 400, "invalid_value", "guided_json"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, 400, "unsupported_parameter", "structured_outputs"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"guided_json": {}}},
            400,
            "invalid_value",
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "blob"}}}},
            400,
            "invalid_value",
            "response_format",
        ),
        ({"tools": [BROKEN_TOOL], "tool_choice": "required"}, 400, "invalid_value", "tools"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, None, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "invalid_value", "messages"),
        ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
        ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
    ],
)
def test_an_unsupported_request_is_refused_by_name(template, asked, status, code, param):
    seen, body = refused(template, **asked)
    assert (seen, body["code"], body["param"]) == (status, code, param)
    assert body["type"] == "invalid_request_error"


def test_engines_that_fail_are_a_server_error_and_remembered(template):
    async def body(client):
        with pytest.raises(openai.InternalServerError, match="no decode worker"):
            await chat(client)
        return client.session.fault

    assert on(template, body, EngineError("no decode worker")) == "no decode worker"


@pytest.mark.parametrize("words", [[], ["{"]], ids=["at once", "after a token"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_no_engine_can_serve_is_a_400_sent_once_and_no_fault(template, stream, words):
    async def body(client):
        async def ask():
            return await chunks_of(await chat(client, stream=stream))

        with pytest.raises(openai.APIError, match="cannot be held to") as caught:
            await ask()
        return caught.value.code, client.session.fault, len(client.policy.requests)

    error = EngineRequestError("the structure of the answer cannot be held to")
    assert on(template, body, [*words, error]) == ("invalid_value", "", 1)


def test_an_engine_that_fails_before_the_first_piece_of_a_stream_has_a_status(template):
    assert refused(template, EngineError("gone"), stream=True)[0] == 503


def test_an_answer_of_an_engine_that_is_none_is_a_bad_gateway(template):
    status, body = refused(template, EngineAnswerError("2 tokens, 1 log-probability"))
    assert (status, body["code"], body["type"]) == (502, "engine_answer", "server_error")


def test_a_turn_that_an_engine_left_unfinished_continues(template):
    async def body(client):
        answer = await chat(client, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in await chunks_of(answer))
        return text, client.policy.requests

    text, (first, second) = on(template, body, ["ab", EngineError("killed")], ["c", "d<eos>"])
    assert text == "abcd"
    assert second.token_ids == [*first.token_ids, *template.encode("ab")]


def test_calls_at_the_same_time_have_separate_ids_and_seeds(template):
    async def body(client):
        held = {"response_format": {"type": "json_object"}}  # what an answer must be is checked in a thread
        await asyncio.gather(*(chat(client, **held) for _ in range(4)))
        return client.policy.requests

    requests = on(template, body, *["{}<eos>"] * 4)
    assert len({request.request_id for request in requests}) == len({request.seed for request in requests}) == 4


def test_only_a_call_with_a_seed_needs_it(template):
    async def body(client):
        await chat(client)
        await chat(client, seed=3)
        return [request.needs_seed for request in client.policy.requests]

    assert on(template, body, "a<eos>", "b<eos>") == [False, True]


def test_a_client_that_hangs_up_ends_its_request(template):
    async def body(client):
        call = asyncio.create_task(chat(client, stream=True))
        stream = await call
        await anext(aiter(stream))
        await client.policy.hung.wait()
        await stream.close()
        await client.policy.ended.wait()

    on(template, body, ["a", None])


@pytest.mark.parametrize("ending", ["the client leaves", "the episode ends", "the engine fails"])
def test_what_was_generated_of_an_answer_that_ended_early_is_trained(template, ending):
    async def body(client):
        stream = await chat(client, stream=True)
        chunks = aiter(stream)
        while not (await anext(chunks)).choices[0].delta.content:
            pass
        if ending == "the client leaves":
            await stream.close()
            await client.policy.ended.wait()
        elif ending == "the episode ends":
            await client.proxy.close(client.api_key)
        else:
            with pytest.raises(openai.APIError):
                await anext(chunks)
        turns = client.session.recording.turns
        while not turns:  # until the server has noticed
            await asyncio.sleep(0.01)
        return turns, build_record(turns, FACTS, reward=1.0)

    turns, record = on(template, body, ["ab", EngineError("gone") if ending == "the engine fails" else None])
    (turn,) = turns
    assert (turn.answer, turn.completion.finish_reason) == ({"role": "assistant", "content": "ab"}, "aborted")
    assert template.decode(record.token_ids[record.loss_mask].tolist()) == "ab"


def test_a_conversation_continues_after_an_answer_that_the_client_left(template):
    async def body(client):
        stream = await chat(client, stream=True)
        await anext(aiter(stream))
        await client.policy.hung.wait()
        await stream.close()
        await client.policy.ended.wait()
        left = {"role": "assistant", "content": "ab"}
        await chat(client, messages=[*QUESTION, left, {"role": "user", "content": "go on"}])
        return client.session.recording.turns

    first, second = on(template, body, ["ab", None], "c<eos>")
    assert second.prompt.parent is first
    assert template.decode_all(second.prompt.new_token_ids) == "<eos><user>go on<agent>"


def test_a_client_that_hangs_up_before_any_answer_ends_its_request(template):
    async def body(client):
        call = asyncio.create_task(chat(client))
        await client.policy.hung.wait()
        call.cancel()
        await client.policy.ended.wait()

    on(template, body, None)


def test_a_closed_session_ends_its_running_calls(template):
    async def body(client):
        call = asyncio.create_task(chat(client))
        await client.policy.hung.wait()
        await client.proxy.close(client.api_key)
        await client.policy.ended.wait()
        with pytest.raises(openai.APIError):
            await call
        with pytest.raises(openai.AuthenticationError):
            await chat(client)

    on(template, body, None)


def test_an_answer_after_an_overflow_clears_it(template):
    """A program that shortens its conversation continues; one that has used up its turns does not."""

    async def body(client):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await chat(client, messages=[{"role": "user", "content": "x" * 200}])
        before = client.session.limit
        await chat(client)
        return before, client.session.limit

    assert on(template, body, "a<eos>") == ("overflow", "")


def test_only_answered_calls_use_up_turns(template):
    limits = msgspec.structs.replace(LIMITS, max_turns=1)
    too_long = [{"role": "user", "content": "x" * 126}]  # counted as more than the context only when it is rendered
    bad_calls = [{"messages": too_long}, {"response_format": {"type": "grammar"}}, {}, {}]

    async def body(client):
        for asked in bad_calls:
            with pytest.raises(openai.APIStatusError):
                await chat(client, **asked)
        refusal = client.session.refusal
        await chat(client)
        with pytest.raises(openai.BadRequestError, match="1 times"):
            await chat(client)
        return refusal, len({request.request_id for request in client.policy.requests})

    failures = [EngineError("gone"), EngineRequestError("no token of it exists")]
    refusal, num_ids = on(template, body, *failures, "a<eos>", limits=limits)
    assert (refusal, num_ids) == ("POST /v1/chat/completions: no token of it exists", 3)


def test_only_the_first_call_waits_for_the_version_that_the_episode_needs(template):
    async def body(client):
        for _ in range(3):
            await chat(client)
        return [request.min_version for request in client.policy.requests]

    assert on(template, body, "a<eos>", "a<eos>", "a<eos>", needed_version=1, newest_version=lambda: 1) == [1, 0, 0]


def test_a_stale_episode_is_refused_and_over(template):
    newest = itertools.chain([0, 0], itertools.repeat(2))

    async def body(client):
        await chat(client)
        with pytest.raises(openai.APIStatusError) as caught:
            await chat(client)
        return caught.value.status_code, client.session.is_stale, client.session.stop_event.is_set()

    assert on(template, body, "a<eos>", newest_version=lambda: next(newest)) == (410, True, True)


def test_calls_beyond_max_turns_are_refused(template):
    limits = EpisodeLimits(max_turns=1, max_new_tokens=4, context_length=64, max_lag=1)

    async def body(client):
        await chat(client)
        with pytest.raises(openai.BadRequestError, match="1 times"):
            await chat(client)
        return bool(client.session.limit)

    assert on(template, body, "a<eos>", limits=limits)


@pytest.mark.parametrize(
    ("path", "data", "status", "code"),
    [
        ("chat/completions", b"{nonsense", 400, "invalid_json"),
        ("chat/completions", b"\xff\xfe", 400, "invalid_json"),
        ("chat/completions", b'{"model": "\\ud800"}', 400, "invalid_json"),
        ("chat/completions", b"[]", 400, "invalid_value"),
        ("chat/completions", b"{}", 400, "invalid_value"),
        ("completions", b'{"model": "hpcrl", "prompt": ""}', 400, "invalid_value"),
        ("completions", b'{"model": "hpcrl", "prompt": [1000000]}', 400, "invalid_value"),
        ("embeddings", b"{}", 404, None),
        ("models", b"{}", 405, None),
        ("hpcrl/reward", b'{"reward": "much"}', 403, "not_a_reward_key"),
    ],
)
def test_nonsense_is_refused_in_openais_form(template, path, data, status, code):
    async def body(client):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as raw,
            raw.post(f"{client.proxy.url}/{path}", data=data) as http,
        ):
            return http.status, (await http.json())["error"]

    seen, error = on(template, body)
    assert (seen, error["code"]) == (status, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "param", "why"),
    [
        ("POST", "completions", {"prompt": "a", "echo": True}, 400, "echo", "'echo' is not supported: leave it out"),
        ("POST", "completions", {"prompt": "x" * 200}, 400, "prompt", "maximum context length"),
        ("POST", "tokenize", {"prompt": "x" * 5000}, 400, "prompt", "maximum context length is 128"),
        ("GET", "responses/resp_1", None, 404, None, "cannot be read"),
        (
            "POST",
            "chat/completions",
            {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": ""}}]},
            400,
            "tools",
            "without a name",
        ),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(template, method, path, sent, status, param, why):
    async def body(client):
        async with (
            aiohttp.ClientSession(headers={"x-api-key": client.api_key}) as raw,
            raw.request(method, f"{client.proxy.url}/{path}", json=sent and {"model": "hpcrl", **sent}) as http,
        ):
            return http.status, (await http.json())["error"]

    seen, error = on(template, body)
    assert (seen, error["param"]) == (status, param)
    assert why in error["message"]


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\xff\xfe\r\n\r\n"])
def test_a_request_that_is_not_http_is_refused_and_not_logged(template, sent, caplog):
    async def body(client):
        port = int(client.proxy.url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        return answer

    assert b" 400 " in on(template, body).splitlines()[0]
    assert caplog.text == ""


def test_clients_that_leave_have_one_work_in_the_thread_at_a_time(template, monkeypatch):
    """The others wait until it has ended; what they sent is then forgotten."""
    started, go_on, running, most = threading.Event(), threading.Event(), [], []

    def parse(body, *given, parse=text_form.parse_body, **named):
        running.append(body)
        most.append(len(running))
        started.set()
        assert go_on.wait(20)
        running.remove(body)
        return parse(body, *given, **named)

    monkeypatch.setattr(text_form, "parse_body", parse)

    async def body(client):
        data = json.dumps({"model": "hpcrl", "prompt": "x" * (300 << 10)}).encode()
        async with aiohttp.ClientSession(headers={"x-api-key": client.api_key}) as raw:

            async def leave():
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05), raw.post(f"{client.proxy.url}/completions", data=data):
                        pass

            await asyncio.gather(*(leave() for _ in range(3)))
            await asyncio.to_thread(started.wait, 20)
            await asyncio.gather(*(leave() for _ in range(3)))
            is_held = client.session.large_body.locked()
            go_on.set()
            async with raw.post(f"{client.proxy.url}/completions", data=data) as http:
                return is_held, http.status

    assert on(template, body) == (True, 400)
    assert (max(most), len(most)) == (1, 2)


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(template):
    async def body(client):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        asked = {"model": "hpcrl", "messages": QUESTION}
        async with (
            aiohttp.ClientSession(headers=headers) as raw,
            raw.post(f"{client.proxy.url}/chat/completions", json=asked, expect100=True) as http,
        ):
            return (await http.json())["choices"][0]["message"]["content"]

    assert on(template, body, "=2<eos>") == "=2"


def test_a_body_that_is_too_long_is_refused(template, monkeypatch):
    monkeypatch.setattr(proxy_module, "MAX_BODY_BYTES", 1000)

    async def body(client):
        with pytest.raises(openai.APIStatusError) as caught:
            await chat(client, messages=[{"role": "user", "content": "x" * 2000}])
        return caught.value.status_code, caught.value.body["message"]

    reported = []
    options = {"report": lambda session, notice: reported.append(notice)}
    status, message = on(template, body, proxy_options=options)
    assert (status, message) == (413, "the request has a body of more than 1000 bytes: it is refused: send less")
    assert reported == ["a body of more than 1000 bytes: it is refused"]


def test_one_model_is_described_and_another_is_not_found(template):
    async def body(client):
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("another")
        return (await client.models.retrieve("hpcrl")).id

    assert on(template, body) == "hpcrl"


def test_the_proxy_can_be_reached_by_a_private_socket_file(template):
    async def body(client):
        path = client.proxy.socket_path
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), headers=headers) as raw,
            raw.get("http://model/v1/models") as http,
        ):
            return path.parent.stat().st_mode & 0o777, (await http.json())["data"][0]["id"]

    assert on(template, body) == (0o700, "hpcrl")


def test_two_programs_are_distinguished_by_their_keys(template):
    async def body(client):
        other = session_of(template, name="s/1/0", limits=LIMITS)
        async with client.with_options(api_key=client.proxy.open(other)) as second:
            await chat(client)
            await chat(second)
        return [len(session.recording.turns) for session in (client.session, other)], client.policy.requests

    counts, (first, second) = on(template, body, "a<eos>", "b<eos>")
    assert counts == [1, 1]
    assert first.seed != second.seed
