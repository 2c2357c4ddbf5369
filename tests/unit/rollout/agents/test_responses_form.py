"""What OpenAI's responses keep in memory: each message once, however often a program sends it."""

import gc
import json
import sys
from types import FunctionType, MethodType, ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rollout.agents.answers import ModelAnswer, NamedCall, TokenUsage
from hpcrl.rollout.agents.responses_form import ResponseMemory, ResponsesForm
from hpcrl.rollout.agents.tool_parsers import ContentText, ReasoningText

USAGE = TokenUsage(num_prompt=1, num_generated=1)
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


def respond(memory, template, number, **asked):
    """Answer a request with a thought, a text and a call; return its messages and the response."""
    form = ResponsesForm(
        json.dumps({"model": "hpcrl", "tools": TOOLS, **asked}).encode(), template=template, memory=memory
    )
    call = NamedCall(id=f"call-{number}", number=0, name="look", arguments={"x": number})
    pieces = [ReasoningText(f"thought {number}"), ContentText(f"text {number}"), call]
    answer = ModelAnswer(index=0, pieces=pieces, finish_reason="stop", stop_text=None, parts=[])
    return form.call.messages, form.make_response([answer], USAGE)


def result_of(number):
    return {"type": "function_call_output", "call_id": f"call-{number}", "output": f"result {number}"}


def talk_whole(memory, template, num_turns, *, num_conversations=1):
    """Hold conversations that take turns and send all their items each time."""
    inputs = [[{"role": "user", "content": f"question {number}"}] for number in range(num_conversations)]
    for turn in range(num_turns):
        items = inputs[turn % num_conversations]
        messages, response = respond(memory, template, turn, input=items)
        items += [*response["output"], result_of(turn)]
    return messages


def talk_by_reference(memory, template, num_turns):
    messages, response = respond(memory, template, 0, input="question 0")
    for turn in range(1, num_turns):
        asked = {"previous_response_id": response["id"], "input": [result_of(turn - 1)]}
        messages, response = respond(memory, template, turn, **asked)
    return messages


def talk_in_two(memory, template, num_turns):
    return talk_whole(memory, template, num_turns, num_conversations=2)


def measure_bytes(root):
    """Return the bytes of all objects that an object leads to."""
    seen, found = {id(root)}, [root]
    for one in found:
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, type | FunctionType | MethodType | ModuleType):
                seen.add(id(other))
                found.append(other)
    return sum(map(sys.getsizeof, found))


@pytest.mark.parametrize("talk", [talk_whole, talk_in_two, talk_by_reference])
def test_the_memory_of_an_episode_grows_with_its_turns_and_no_faster(template, talk):
    num_bytes = []
    for num_turns in (40, 80, 160):
        memory = ResponseMemory()
        talk(memory, template, num_turns)
        num_bytes.append(measure_bytes(memory))
    assert num_bytes[2] - num_bytes[1] < 2.3 * (num_bytes[1] - num_bytes[0])


def test_items_sent_again_are_the_same_messages(template):
    memory = ResponseMemory()
    assert talk_whole(memory, template, 4) == talk_by_reference(ResponseMemory(), template, 4)
    expected = [{"role": "user", "content": "question 0"}]
    for number in range(3):
        function = {"name": "look", "arguments": {"x": number}}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        answer = {"role": "assistant", "content": f"text {number}", "reasoning_content": f"thought {number}"}
        expected += [{**answer, "tool_calls": [call]}]
        expected += [{"role": "tool", "content": f"result {number}", "tool_call_id": f"call-{number}"}]
    assert talk_whole(memory, template, 4) == expected


def test_a_changed_item_changes_the_message_that_it_is_part_of(template):
    memory = ResponseMemory()
    _, response = respond(memory, template, 0, input="a")
    items = [{"role": "user", "content": "a"}, *response["output"], result_of(0)]
    before, _ = respond(memory, template, 1, input=items)
    thought = {**items[1], "content": [{"type": "reasoning_text", "text": "other"}]}
    text = {**items[2], "content": "shorter"}
    changed, _ = respond(memory, template, 2, input=[items[0], thought, *items[2:]])
    shortened, _ = respond(memory, template, 3, input=[*items[:2], text, *items[3:]])
    assert [one[1]["reasoning_content"] for one in (before, changed, shortened)] == ["thought 0", "other", "thought 0"]
    assert [one[1]["content"] for one in (before, changed, shortened)] == ["text 0", "text 0", "shorter"]
    assert respond(memory, template, 4, input=items)[0] == before


def message(role):
    return {"role": role, "content": f"a {role}"}


KINDS = {
    "thought": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
    "text": {"type": "message", **message("assistant")},
    "call": {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"},
    "result": {"type": "function_call_output", "call_id": "1", "output": "seen"},
    "question": message("user"),
    "search": {"type": "web_search_call", "id": "ws_1"},
}


@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.sampled_from(sorted(KINDS)), max_size=5)), max_size=8))
def test_what_was_read_before_changes_no_message(changes):
    """Each request keeps some first items of the one before, and others follow."""
    memory, kinds = ResponseMemory(), []
    for num_kept, added in changes:
        kinds = [*kinds[:num_kept], *added]
        items = [msgspec.Raw(json.dumps(KINDS[kind]).encode()) for kind in kinds]
        assert memory.read_items(items) == ResponseMemory().read_items(items)
