"""Each form of the model's API, called by its own client: a conversation with a tool is one recorded conversation."""

import asyncio
import gzip
import json
from pathlib import Path
from threading import Event, get_ident

import aiohttp
import msgspec
import openai
import pytest

from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents import chat_form, messages_form, requests, responses_form, text_form
from hpcrl.rollout.agents.requests import ApiError, parse_body
from hpcrl.rollout.agents.server import CALLS_NOTICE, LAST_ANSWER_NOTICE, NEIGHBOURS_NOTICE, ONE_CALL_NOTICE
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.testing.model_templates import FAMILIES, save_family
from tests.support.scripted import CALL, QUESTION, TOOLS, opened

LIMITS = EpisodeLimits(max_turns=8, max_new_tokens=256, context_length=4096, max_lag=1)
FLAT_TOOL = {"type": "function", **TOOLS[0]["function"]}
CLAUDE_TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
SPOKEN = ["so", f" {CALL[:15]}", f"{CALL[15:]}<eos>"]


def on(template, body, *words, **changed):
    async def run():
        async with asyncio.timeout(120), opened(template, *words, **({"limits": LIMITS} | changed)) as client:
            return await body(client)

    return asyncio.run(run())


def claude(client):
    import anthropic  # takes seconds, and every process imports this module

    return anthropic.AsyncAnthropic(
        base_url=client.proxy.url.removesuffix("/v1"), api_key=client.api_key, max_retries=0
    )


async def play_chat(client):
    first = (await client.chat.completions.create(model="hpcrl", messages=QUESTION, tools=TOOLS)).choices[0]
    (call,) = first.message.tool_calls
    result = {"role": "tool", "content": "2", "tool_call_id": call.id}
    second = await client.chat.completions.create(
        model="hpcrl", messages=[*QUESTION, first.message, result], tools=TOOLS
    )
    assert first.finish_reason == "tool_calls"
    return first.message.content, call.function.name, call.function.arguments, second.choices[0].message.content


async def play_legacy_chat(client):
    asked = {"model": "hpcrl", "functions": [TOOLS[0]["function"]]}
    first = (await client.chat.completions.create(messages=QUESTION, **asked)).choices[0]
    called = first.message.function_call
    result = {"role": "function", "name": "add", "content": "2"}
    second = await client.chat.completions.create(messages=[*QUESTION, first.message, result], **asked)
    assert first.finish_reason == "function_call"
    return first.message.content, called.name, called.arguments, second.choices[0].message.content


async def play_responses(client):
    items = [{"role": "user", "content": [{"type": "input_text", "text": "1+1=?"}]}]
    first = await client.responses.create(model="hpcrl", input=items, tools=[FLAT_TOOL])
    text, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    second = await client.responses.create(model="hpcrl", input=[*items, *first.output, result], tools=[FLAT_TOOL])
    return text.content[0].text, call.name, call.arguments, second.output_text


async def play_remembered_responses(client):
    first = await client.responses.create(model="hpcrl", input="1+1=?", tools=[FLAT_TOOL])
    call = first.output[-1]
    second = await client.responses.create(
        model="hpcrl",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "2"}],
        previous_response_id=first.id,
        tools=[FLAT_TOOL],
    )
    return first.output_text, call.name, call.arguments, second.output_text


async def play_streamed_responses(client):
    asked = {"model": "hpcrl", "tools": [FLAT_TOOL], "stream": True}
    events = [event async for event in await client.responses.create(input="1+1=?", **asked)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].response.output == done
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    call = done[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    items = [
        {"role": "user", "content": "1+1=?"},
        *({"type": "item_reference", "id": item.id} for item in done),
        result,
    ]
    events = [event async for event in await client.responses.create(input=items, **asked)]
    return text, call.name, call.arguments, events[-1].response.output_text


async def play_messages(client):
    asked = {"model": "hpcrl", "max_tokens": 200, "tools": [CLAUDE_TOOL]}
    async with claude(client) as other:
        first = await other.messages.create(messages=QUESTION, **asked)
        text, call = first.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
        history = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await other.messages.create(messages=history, **asked)
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    return text.text, call.name, json.dumps(call.input), second.content[0].text


async def play_streamed_messages(client):
    asked = {"model": "hpcrl", "max_tokens": 200, "tools": [CLAUDE_TOOL]}
    async with claude(client) as other:
        async with other.messages.stream(messages=QUESTION, **asked) as stream:
            first = await stream.get_final_message()
        text, call = first.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
        history = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with other.messages.stream(messages=history, **asked) as stream:
            second = await stream.get_final_message()
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    return text.text, call.name, json.dumps(call.input), second.content[0].text


FORMS = {
    "chat": play_chat,
    "legacy": play_legacy_chat,
    "responses": play_responses,
    "remembered": play_remembered_responses,
    "streamed-responses": play_streamed_responses,
    "messages": play_messages,
    "streamed-messages": play_streamed_messages,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_with_a_tool_is_one_conversation_in_every_form(template, form):
    async def body(client):
        return await FORMS[form](client), client.session.recording.turns

    (text, name, arguments, answer), turns = on(template, body, SPOKEN, "ok<eos>")
    assert (text, name, json.loads(arguments), answer) == ("so", "add", {"a": 1}, "ok")
    assert turns[1].prompt.parent is turns[0]


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, ["choice"]),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}, ["choice"]),
        ({"response_format": {"type": "json_object"}}, ["json"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}},
            ["json"],
        ),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS}, ["choice"]),
        ({"response_format": {"type": "text"}, "tools": TOOLS, "tool_choice": "auto"}, None),
        ({"extra_body": {"guided_json": {"type": "array"}}}, ["json"]),
        ({"extra_body": {"structured_outputs": {"json": '{"type": "array"}', "regex": None}}}, ["json"]),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, ["json"]),
        ({"extra_body": {"structured_outputs": {}, "guided_json": None}}, None),
    ],
)
def test_what_an_answer_must_be_is_asked_of_the_engine_and_trained(template, asked, parts):
    async def body(client):
        await client.chat.completions.create(model="hpcrl", messages=QUESTION, **asked)
        return client.policy.requests[0].structure, client.session.recording.turns[0].is_trained

    structure, is_trained = on(template, body, "2<eos>")
    assert is_trained
    kinds = None if structure is None else [part.__struct_config__.tag for part in structure.parts]
    assert kinds == parts


def test_the_same_structure_is_asked_for_in_every_form(template):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = TOOLS[0]["function"] | {"parameters": schema}

    async def body(client):
        await client.chat.completions.create(
            model="hpcrl",
            messages=QUESTION,
            tools=[{"type": "function", "function": tool}],
            tool_choice={"type": "function", "function": {"name": "add"}},
        )
        await client.responses.create(
            model="hpcrl",
            input="1+1=?",
            tools=[{"type": "function", **tool}],
            tool_choice={"type": "function", "name": "add"},
        )
        async with claude(client) as other:
            await other.messages.create(
                model="hpcrl",
                max_tokens=9,
                messages=QUESTION,
                tools=[{"name": "add", "input_schema": schema}],
                tool_choice={"type": "tool", "name": "add"},
            )
        return [request.structure for request in client.policy.requests]

    chat, responses, messages = on(template, body, "a<eos>", "a<eos>", "a<eos>")
    assert chat == responses == messages
    (choice,) = chat.parts
    assert choice.alternatives[0][1].schema == schema
    assert not choice.may_repeat


def test_an_answer_that_is_not_held_to_one_call_is_reported(template):
    reported = []
    options = {"report": lambda session, notice: reported.append(notice)}

    async def body(client):
        asked = {"model": "hpcrl", "messages": QUESTION, "tools": TOOLS}
        await client.chat.completions.create(**asked)
        await client.chat.completions.create(**asked, parallel_tool_calls=False)

    on(template, body, "a<eos>", "b<eos>", proxy_options=options)
    assert reported.count(ONE_CALL_NOTICE) == 1


def test_unknown_fields_are_ignored_and_reported_once(template):
    reported = []
    options = {"report": lambda session, notice: reported.append((session.name, notice))}

    async def body(client):
        for _ in range(2):
            extra = {"fancy": 1, "verbosity": "low", "top_a": 0.5, "empty": None}
            await client.chat.completions.create(model="hpcrl", messages=QUESTION, extra_body=extra)
        return client.session.ignored_fields

    assert on(template, body, "a<eos>", "b<eos>", proxy_options=options) == ["fancy", "top_a"]
    assert reported == [("s/0/0", f"{name!r}, which is not known here: it is ignored") for name in ("fancy", "top_a")]


def test_a_response_that_need_not_be_in_the_background_is_nothing_to_report(template):
    reported = []

    async def body(client):
        await client.responses.create(model="hpcrl", input="a", background=False)

    on(template, body, "a<eos>", proxy_options={"report": lambda session, notice: reported.append(notice)})
    assert reported == []


def test_no_tools_of_a_provider_are_nothing_to_report(template):
    asked = b'{"model": "hpcrl", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "mcp_servers": [], '
    reported = []

    async def body(client):
        return await post_raw(client, "messages", asked + b'"container": null}')

    options = {"report": lambda session, notice: reported.append(notice)}
    assert on(template, body, "a<eos>", proxy_options=options)[0] == 200
    assert reported == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_was_cut_is_incomplete(template, stream):
    async def body(client):
        asked = {"model": "hpcrl", "input": "a", "max_output_tokens": 2}
        if not stream:
            return await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(stream=True, **asked)]
        assert [event.item.status for event in events if event.type == "response.output_item.done"] == ["incomplete"]
        return events[-1].response

    response = on(template, body, "a b c d")
    assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")


@pytest.mark.parametrize(
    ("body", "lone"),
    [
        (rb'{"model": "\ud83d"}', r"\ud83d"),
        (rb'{"model": "\ud83d and more"}', r"\ud83d"),
        (rb'{"model": "\ud83d\ude00 \uDE00"}', r"\uDE00"),
        (rb'{"model": "\\ud83d', None),
        (rb'{"model": "\ud83d\ude00', None),
    ],
)
def test_half_of_a_surrogate_pair_is_named(body, lone):
    with pytest.raises(ApiError) as refused:
        parse_body(body, chat_form.ChatRequest)
    assert ("surrogate" in str(refused.value)) == (lone is not None)
    assert lone is None or f"{lone} is half" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (chat_form.ChatRequest, {"messages": [QUESTION], "temperature": 1, "n": None}),
        (text_form.TextRequest, {"prompt": "a", "max_tokens": 4}),
        (responses_form.ResponsesRequest, {"input": "a", "stream": True}),
        (messages_form.MessagesRequest, {"messages": [QUESTION], "max_tokens": 4}),
    ],
)
def test_a_body_without_unknown_fields_is_decoded_once(kind, body, monkeypatch):
    body = {"model": "hpcrl", **body}
    plain, _ = parse_body(msgspec.json.encode({**body, "new": 1}), kind)
    monkeypatch.setattr(requests, "_decode_json", lambda *_: pytest.fail("it is decoded again"))
    parsed, unknown = parse_body(msgspec.json.encode(body), kind)
    assert not unknown
    assert msgspec.to_builtins(parsed, enc_hook=bytes) == msgspec.to_builtins(plain, enc_hook=bytes)


def test_tools_that_the_template_leaves_out_are_described_and_reported(template):
    reported = []

    async def body(client):
        await client.chat.completions.create(model="hpcrl", messages=QUESTION, tools=TOOLS)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as http:
            url = client.proxy.url.removesuffix("/v1") + "/tokenize"
            counts = []
            for tools in ([], TOOLS):
                async with http.post(url, json={"messages": QUESTION, "tools": tools}) as response:
                    counts.append((await response.json())["count"])
        return template.decode_all(client.policy.requests[0].token_ids), counts

    options = {"report": lambda session, notice: reported.append(notice)}
    prompt, (bare, described) = on(template, body, "a<eos>", proxy_options=options)
    assert json.dumps(TOOLS[0]["function"]) in prompt
    assert described > bare + len(json.dumps(TOOLS[0]["function"]))
    assert reported == ["tools, which the chat template leaves out: they are described in the system message"]


def test_a_schema_with_more_than_answers_can_be_held_to_is_served_and_reported_once(template):
    reported, schema = [], {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "paths", "schema": schema}}

    async def body(client):
        await client.chat.completions.create(model="hpcrl", messages=QUESTION, response_format=form)
        return client.policy.requests[0].structure.parts

    options = {"report": lambda session, notice: reported.append(notice)}
    (part,) = on(template, body, "[]<eos>", proxy_options=options)
    assert part.schema == {"type": "array", "items": {"type": "string"}}
    assert reported == [
        f"{keyword} in a JSON schema, to which no answer can be held: it is ignored"
        for keyword in ("uniqueItems", "format 'path'")
    ]


def test_an_error_of_responses_names_the_field_of_that_form(template):
    async def body(client):
        form = {"type": "json_schema", "name": "x", "schema": {"type": "blob"}}
        with pytest.raises(openai.BadRequestError) as schema:
            await client.responses.create(model="hpcrl", input="a", text={"format": form})
        with pytest.raises(openai.BadRequestError) as length:
            await client.responses.create(model="hpcrl", input="a" * 5000)
        return schema.value.param, length.value.param

    assert on(template, body) == ("text.format", "input")


def test_the_names_of_ignored_fields_that_an_episode_keeps_are_bounded(template):
    async def body(client):
        extra = {f"{number}{'x' * 1000}": 1 for number in range(100)}
        await client.chat.completions.create(model="hpcrl", messages=QUESTION, extra_body=extra)
        return client.session.ignored_fields

    names = on(template, body, "a<eos>")
    assert (len(names), max(map(len, names))) == (32, 64)


PENALTIES = {"presence_penalty": 1.0, "extra_body": {"min_p": 0.1, "repetition_penalty": 1.1}}


def test_penalties_are_the_recipes_business(template):
    async def body(client):
        await client.chat.completions.create(model="hpcrl", messages=QUESTION, top_p=0, **PENALTIES)
        return client.session.recording.turns[0].is_trained

    assert on(template, body, "a<eos>")


def test_penalties_that_a_program_decides_are_refused(template):
    async def body(client):
        with pytest.raises(openai.BadRequestError, match=r'min_p = 0.1: engines cannot do it.*sampling = "recipe"'):
            await client.chat.completions.create(model="hpcrl", messages=QUESTION, **PENALTIES)

    on(template, body, sampling="program")


def test_another_name_of_the_model_is_accepted_if_the_recipe_lists_it(template):
    async def body(client):
        listed = [card.id async for card in client.models.list()]
        answer = await client.chat.completions.create(model="gpt-4o-mini", messages=QUESTION)
        with pytest.raises(openai.NotFoundError, match=r"use 'hpcrl' or 'gpt-4o-mini'.*rollout.model_aliases"):
            await client.chat.completions.create(model="gpt-4o", messages=QUESTION)
        return listed, answer.model

    options = {"aliases": ["gpt-4o-mini"]}
    assert on(template, body, "a<eos>", proxy_options=options) == (["hpcrl", "gpt-4o-mini"], "gpt-4o-mini")


def test_any_name_of_the_model_is_accepted_with_the_alias_for_all(template):
    async def body(client):
        return (await client.responses.create(model="o9", input="a")).model

    assert on(template, body, "a<eos>", proxy_options={"aliases": ["*"]}) == "o9"


def test_tokens_are_counted_without_a_turn(template):
    async def body(client):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with claude(client) as other, aiohttp.ClientSession(client.proxy.url[:-3], headers=headers) as raw:
            counted = (await other.messages.count_tokens(model="hpcrl", messages=QUESTION)).input_tokens
            async with raw.post("/tokenize", json={"messages": QUESTION}) as http:
                found = await http.json()
            async with raw.post("/detokenize", json={"tokens": found["tokens"]}) as http:
                text = (await http.json())["prompt"]
        return counted, found["count"], text, client.session.num_calls

    counted, count, text, num_calls = on(template, body)
    assert counted == count == 7
    assert (text, num_calls) == (template.render(QUESTION), 0)


@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
def test_rules_of_the_developer_or_system_reach_the_prompt(template, form):
    async def body(client):
        match form:
            case "chat":
                rules = {"role": "developer", "content": "RULE"}
                await client.chat.completions.create(model="hpcrl", messages=[rules, *QUESTION])
            case "responses":
                await client.responses.create(model="hpcrl", input=QUESTION, instructions="RULE")
            case "messages":
                async with claude(client) as other:
                    rules = [{"type": "text", "text": "RULE", "cache_control": {"type": "ephemeral"}}]
                    await other.messages.create(model="hpcrl", max_tokens=9, messages=QUESTION, system=rules)
        return client.session.recording.turns[0].prompt.rendered

    assert "RULE" in on(template, body, "a<eos>")


DEEP = b"[" * 100_000 + b"]" * 100_000
NESTED = b"[" * 900 + b"]" * 900
BAD_BODIES = {
    "chat-model": ("chat/completions", b'{"model": 3, "messages": [{"role": "user", "content": "a"}]}'),
    "chat-messages": ("chat/completions", b'{"model": "hpcrl", "messages": "hi"}'),
    "chat-message": ("chat/completions", b'{"model": "hpcrl", "messages": [3]}'),
    "chat-content": ("chat/completions", b'{"model": "hpcrl", "messages": [{"role": "user", "content": {"a": 1}}]}'),
    "chat-calls": (
        "chat/completions",
        b'{"model": "hpcrl", "messages": [{"role": "assistant", "tool_calls": [{"function": "add"}]}]}',
    ),
    "chat-call-list": ("chat/completions", b'{"model": "hpcrl", "messages": [{"role": "assistant", "tool_calls": 3}]}'),
    "chat-deep": ("chat/completions", b'{"model": "hpcrl", "messages": ' + DEEP + b"}"),
    "chat-nested": (
        "chat/completions",
        b'{"model": "hpcrl", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", '
        b'"function": {"name": "f", "parameters": {"a": ' + NESTED + b"}}}]}",
    ),
    "chat-audio": (
        "chat/completions",
        b'{"model": "hpcrl", "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}',
    ),
    "chat-tool": (
        "chat/completions",
        b'{"model": "hpcrl", "messages": [{"role": "user"}], "tools": [{"function": 1}]}',
    ),
    "chat-named": (
        "chat/completions",
        b'{"model": "hpcrl", "messages": [{"role": "user"}], "tools": [{"function": {"name": "f"}}], '
        b'"tool_choice": {"type": "function", "function": {"name": "g"}}}',
    ),
    "responses-input": ("responses", b'{"model": "hpcrl", "input": 3}'),
    "responses-none": ("responses", b'{"model": "hpcrl"}'),
    "responses-item": ("responses", b'{"model": "hpcrl", "input": [{"type": "computer_call"}]}'),
    "responses-image": (
        "responses",
        b'{"model": "hpcrl", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}',
    ),
    "responses-summary": ("responses", b'{"model": "hpcrl", "input": [{"type": "reasoning", "summary": true}]}'),
    "responses-earlier": ("responses", b'{"model": "hpcrl", "input": "a", "previous_response_id": "resp_1"}'),
    "responses-role": ("responses", b'{"model": "hpcrl", "input": [{"type": "message", "content": "a"}]}'),
    "responses-screen": ("responses", b'{"model": "hpcrl", "input": [{"type": "computer_call_output"}]}'),
    "responses-hosted": (
        "responses",
        b'{"model": "hpcrl", "input": "a", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}',
    ),
    "responses-allowed": (
        "responses",
        b'{"model": "hpcrl", "input": "a", "tools": [{"type": "mcp"}, {"type": "function", "name": "f"}], '
        b'"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}, {"type": "mcp"}]}}',
    ),
    "chat-custom": (
        "chat/completions",
        b'{"model": "hpcrl", "messages": [{"role": "user"}], "tools": [{"type": "custom", "custom": {"name": "f"}}], '
        b'"tool_choice": {"type": "custom", "custom": {"name": "f"}}}',
    ),
    "messages-pdf": (
        "messages",
        b'{"model": "hpcrl", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "document", "source": '
        b'{"type": "base64", "media_type": "application/pdf", "data": "eA=="}}]}]}',
    ),
    "messages-hosted": (
        "messages",
        b'{"model": "hpcrl", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "tools": [{"type": '
        b'"bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}}',
    ),
    "messages-empty": ("messages", b'{"model": "hpcrl", "max_tokens": 9, "messages": []}'),
    "messages-json": ("messages", b"{nonsense"),
    "messages-role": ("messages", b'{"model": "hpcrl", "max_tokens": 9, "messages": [{"role": "king"}]}'),
    "messages-image": (
        "messages",
        b'{"model": "hpcrl", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image"}]}]}',
    ),
    "messages-started": (
        "messages",
        b'{"model": "hpcrl", "max_tokens": 9, "messages": [{"role": "assistant", "content": "I"}]}',
    ),
    "messages-servers": (
        "messages",
        b'{"model": "hpcrl", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], '
        b'"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "x"}]}',
    ),
    "messages-container": (
        "messages",
        b'{"model": "hpcrl", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "container": "c_1"}',
    ),
    "text-prompts": ("completions", b'{"model": "hpcrl", "prompt": ["a", "b"]}'),
    "text-suffix": ("completions", b'{"model": "hpcrl", "prompt": "a", "suffix": "b"}'),
    "tokenize-none": ("tokenize", b"{}"),
    "detokenize-outside": ("detokenize", b'{"tokens": [100000000]}'),
}


_ASKED = {"role": "user", "content": "Hm?"}
_FOUND = {"title": "Town", "source": "map", "content": [{"type": "text", "text": "It is small."}]}
_PAGE = {"title": "Note", "context": "old", "source": {"type": "text", "media_type": "text/plain", "data": "Go left."}}
_PARTS = {"source": {"type": "content", "content": [{"type": "text", "text": "Go on."}]}}
_THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Which?"}]}
READ = {
    "responses-tools": (
        "responses",
        {"input": "Hm?", "tools": [{"type": "web_search"}, {"type": "mcp"}, {"type": "web_search"}, FLAT_TOOL]},
        ["add"],
        ["tools of type web_search", "tools of type mcp"],
    ),
    "responses-items": (
        "responses",
        {
            "input": [
                {"type": "web_search_call", "id": "ws_1"},
                {"type": "compaction", "encrypted_content": "x"},
                _ASKED,
            ]
        },
        ["Hm?"],
        ["items of type web_search_call", "items of type compaction"],
    ),
    "responses-custom": (
        "responses",
        {
            "input": [
                {"type": "custom_tool_call", "name": "sh", "input": "ls", "call_id": "c"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "a.txt"},
            ]
        },
        ['"sh"', "ls", "a.txt"],
        [],
    ),
    "chat-tools": (
        "chat/completions",
        {"messages": [_ASKED], "tools": [{"type": "custom", "custom": {"name": "f"}}, *TOOLS]},
        ["add"],
        ["tools of type custom"],
    ),
    "messages-tools": (
        "messages",
        {"messages": [_ASKED], "tools": [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305"}]},
        ["Hm?"],
        ["tools of type bash_20250124", "tools of type web_search_20250305"],
    ),
    "messages-texts": (
        "messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", **_PAGE},
                        {"type": "document", **_PARTS},
                        {"type": "search_result", **_FOUND},
                        {"type": "text", "text": "Where?"},
                    ],
                }
            ]
        },
        ["Note\n\nold\n\nGo left.\n\nGo on.\n\nTown\n\nmap\n\nIt is small.\n\nWhere?"],
        [],
    ),
    "messages-blocks": (
        "messages",
        {
            "messages": [
                _ASKED,
                {"role": "assistant", "content": [{"type": "server_tool_use"}, {"type": "text", "text": "Left."}]},
                _ASKED,
            ]
        },
        ["Left."],
        ["blocks of type server_tool_use"],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_model_can_do_without_is_left_out_and_texts_are_read(template, name):
    path, asked, texts, ignored = READ[name]

    async def body(client):
        sent = json.dumps({"model": "hpcrl", **asked}).encode()
        for _ in range(2):
            status, text = await post_raw(client, path, sent)
            assert status == 200, text
        return client.session

    reported = []
    options = {"report": lambda session, notice: reported.append(notice)}
    session = on(template, body, "a<eos>", "b<eos>", proxy_options=options)
    for text in texts:
        assert text in session.recording.turns[0].prompt.rendered
    assert session.ignored_fields == ignored
    assert [notice for notice in reported if "ignored" in notice] == [
        f"{one!r}, which is not known here: it is ignored" for one in ignored
    ]


@pytest.mark.parametrize("kind", ["thinking", "reasoning", "plain"])
def test_a_thought_among_the_parts_of_an_answer_is_a_thought(kind):
    parts = {
        "thinking": _THOUGHT,
        "reasoning": {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Which?"}]},
        "plain": {"type": "thinking", "thinking": "Which?"},
    }
    message = {"role": "assistant", "content": [parts[kind], {"type": "text", "text": "Left."}]}
    read = requests.normalise_message(message, "messages[0]")
    assert (read["reasoning_content"], read["content"]) == ("Which?", "Left.")


@pytest.mark.parametrize("form", ["chat", "responses"])
def test_an_answer_that_is_sent_as_the_last_message_is_followed_by_another_and_reported(template, form):
    reported, sent = [], [*QUESTION, {"role": "assistant", "content": "Left."}]

    async def body(client):
        if form == "chat":
            await client.chat.completions.create(model="hpcrl", messages=sent)
        else:
            await client.responses.create(model="hpcrl", input=sent)
        return client.session.recording.turns[0].prompt

    options = {"report": lambda session, notice: reported.append(notice)}
    prompt = on(template, body, "a<eos>", proxy_options=options)
    assert prompt.rendered == template.render(sent)
    assert reported == [LAST_ANSWER_NOTICE]


@pytest.fixture(scope="module")
def taking_turns(tmp_path_factory):
    return load_chat_template(save_family(tmp_path_factory.mktemp("gemma"), FAMILIES["Gemma-3"]))


def test_what_is_joined_or_written_as_text_is_reported(taking_turns):
    reported = []
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    sent = [
        *(QUESTION * 2),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "a wall", "tool_call_id": "c"},
    ]

    async def body(client):
        await client.chat.completions.create(model="hpcrl", messages=QUESTION)
        assert reported == []
        await client.chat.completions.create(model="hpcrl", messages=sent)
        return client.session.recording.turns[1].prompt.rendered

    options = {"report": lambda session, notice: reported.append(notice)}
    rendered = on(taking_turns, body, "a<end_of_turn>", "b<end_of_turn>", proxy_options=options)
    assert '"look"' in rendered
    assert "a wall" in rendered
    assert reported == [CALLS_NOTICE, NEIGHBOURS_NOTICE]


async def post_raw(client, path, data):
    async with (
        aiohttp.ClientSession(headers={"x-api-key": client.api_key, "content-type": "application/json"}) as raw,
        raw.post(f"{client.proxy.url}/{path}", data=data) as http,
    ):
        return http.status, await http.text()


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_refused_in_one_line_in_the_form_of_its_api(template, name):
    path, data = BAD_BODIES[name]

    async def body(client):
        return await post_raw(client, path, data)

    status, text = on(template, body)
    refused = json.loads(text)
    assert status == 400
    assert (refused.get("type") == "error") == (path == "messages")
    message = refused["error"]["message"]
    assert message
    assert "\n" not in message
    assert len(message) < 400


async def post_long(client, form, *, role, num_words):
    text = "word " * num_words
    messages = [{"role": role, "content": text}, {"role": "user", "content": "go on"}]
    asked = {"model": "hpcrl", "max_tokens": 9, "messages": messages, "input": messages}
    if form == "completions":
        asked["prompt"] = text
    status, text = await post_raw(client, form, json.dumps(asked).encode())
    return status, json.loads(text).get("error", {}).get("message")


@pytest.mark.parametrize("form", ["chat/completions", "responses", "messages"])
def test_a_body_of_10_mb_is_refused_before_it_is_tokenised(template, form, monkeypatch):
    monkeypatch.setattr(type(template), "encode_text", lambda *_: pytest.fail("it was tokenised"))

    async def body(client):
        return await post_long(client, form, role="user", num_words=2_000_000), bool(client.session.limit)

    (status, message), is_truncated = on(template, body)
    assert (status, is_truncated) == (400, True)
    assert "maximum context length is 4096" in message


FORM_PATHS = ["chat/completions", "completions", "responses", "messages"]


def test_a_compressed_body_is_read_beside_the_event_loop_however_small_it_is(template, monkeypatch):
    threads = []
    monkeypatch.setattr(
        chat_form, "parse_body", lambda *given, parse=chat_form.parse_body: threads.append(get_ident()) or parse(*given)
    )
    sent = json.dumps({"model": "hpcrl", "messages": [{"role": "user", "content": "a"}]}).encode()

    async def body(client):
        headers = {"x-api-key": client.api_key, "Content-Encoding": "gzip"}
        async with (
            aiohttp.ClientSession(client.proxy.url[:-3], headers=headers) as raw,
            raw.post("/v1/chat/completions", data=gzip.compress(sent)) as http,
        ):
            return http.status

    assert on(template, body, "a<eos>") == 200
    assert threads != [get_ident()]


@pytest.mark.parametrize("form", FORM_PATHS)
def test_a_long_body_is_read_beside_the_event_loop(template, form, monkeypatch):
    threads = []
    for module in (chat_form, messages_form, responses_form, text_form):
        monkeypatch.setattr(
            module, "parse_body", lambda *given, parse=module.parse_body: threads.append(get_ident()) or parse(*given)
        )

    async def body(client):
        await post_long(client, form, role="user", num_words=60_000)

    on(template, body)
    assert len(threads) == 1
    assert threads[0] != get_ident()


@pytest.mark.parametrize("form", FORM_PATHS)
def test_the_body_of_a_call_beyond_max_turns_is_not_read(template, form, monkeypatch):
    for module in (chat_form, messages_form, responses_form, text_form):
        monkeypatch.setattr(module, "parse_body", lambda *_: pytest.fail("it was read"))

    async def body(client):
        return await post_long(client, form, role="user", num_words=60_000), bool(client.session.limit)

    (status, message), is_truncated = on(template, body, limits=msgspec.structs.replace(LIMITS, max_turns=0))
    assert (status, is_truncated) == (400, True)
    assert "0 times at most" in message


def test_the_prompt_of_a_long_body_is_made_beside_the_event_loop(template, monkeypatch):
    threads = []
    render = type(template).render
    monkeypatch.setattr(
        type(template), "render", lambda *given, **named: threads.append(get_ident()) or render(*given, **named)
    )

    async def body(client):
        for num_words in (60_000, 6):
            await post_long(client, "chat/completions", role="assistant", num_words=num_words)

    on(template, body, "a<eos>", "a<eos>", limits=msgspec.structs.replace(LIMITS, context_length=1 << 20))
    assert threads[0] != get_ident()
    assert threads[-1] == get_ident()


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens", "../tokenize"])
def test_more_messages_than_the_context_has_tokens_are_refused_before_they_are_rendered(template, path, monkeypatch):
    monkeypatch.setattr(type(template), "render", lambda *_, **__: pytest.fail("it was rendered"))
    messages = b",".join([b'{"role":"assistant","content":""}'] * 20_000 + [b'{"role":"user","content":""}'])
    data = b'{"model": "hpcrl", "max_tokens": 9, "messages": [' + messages + b"]}"

    async def body(client):
        return await post_raw(client, path, data)

    status, text = on(template, body)
    assert status == 400
    assert "20001" in text


def test_a_program_has_one_large_request_read_at_a_time(template, monkeypatch):
    """Small calls are answered meanwhile, also those of other programs, and large ones of others have their turn."""
    started, go_on, bodies = Event(), Event(), []

    def parse(body, *given, parse=text_form.parse_body, **named):
        if len(body) > 1000:
            bodies.append(body)
            started.set()
            assert go_on.wait(20)
        return parse(body, *given, **named)

    monkeypatch.setattr(text_form, "parse_body", parse)

    async def body(client):
        large = {"prompt": "word " * 60_000}
        async with aiohttp.ClientSession(client.proxy.url[:-3], headers={"x-api-key": client.api_key}) as raw:

            async def tokenize(sent):
                async with raw.post("/tokenize", json=sent) as http:
                    return (await http.json())["count"]

            calls = [asyncio.create_task(tokenize(large)) for _ in range(3)]
            await asyncio.to_thread(started.wait, 20)
            small = await tokenize({"prompt": "a"})
            num_before = len(bodies)
            go_on.set()
            return small, num_before, await asyncio.gather(*calls)

    limits = msgspec.structs.replace(LIMITS, context_length=1 << 20)
    small, num_before, counts = on(template, body, limits=limits)
    assert (small, num_before, counts) == (1, 1, [300_000] * 3)


RECORDED = sorted((Path(__file__).parent / "requests").glob("*.json"))
"""What unmodified agents sent in real runs, texts cut at 300 characters."""


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_an_unmodified_agent_sends_is_answered(template, path):
    sent = json.loads(path.read_text())
    limits = EpisodeLimits(max_turns=len(sent), max_new_tokens=16, context_length=1 << 20, max_lag=1)

    async def body(client):
        async with aiohttp.ClientSession(client.proxy.url[:-3], headers={"x-api-key": client.api_key}) as raw:
            for one in sent:
                async with raw.post(one["path"], json=one["body"]) as http:
                    assert http.status == 200, await http.text()
                    await http.read()
        return client.session

    session = on(template, body, *["ok<eos>"] * len(sent), limits=limits)
    assert len(session.recording.turns) == len(sent)
    assert session.ignored_fields == []
