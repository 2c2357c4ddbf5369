"""Each form of the model's API, called by its own client: a conversation with a tool is one recorded conversation."""

import asyncio
import json

import anthropic
import pytest

from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.episode import EpisodeLimits
from tests.support.scripted import CALL, QUESTION, TOOLS, opened

LIMITS = EpisodeLimits(max_turns=8, max_new_tokens=256, context_length=4096, max_lag=1)
FLAT_TOOL = {"type": "function", **TOOLS[0]["function"]}
CLAUDE_TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
SPOKEN = ["so", f" {CALL[:15]}", f"{CALL[15:]}<eos>"]


@pytest.fixture
def template(tiny_model_dir):
    return load_chat_template(tiny_model_dir)


def on(template, body, *words, **changed):
    async def run():
        async with asyncio.timeout(120), opened(template, *words, **({"limits": LIMITS} | changed)) as client:
            return await body(client)

    return asyncio.run(run())


def claude(client):
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
