"""The text that a family is made to write for a required call is read as that call."""

import json

import pytest

from hpcrl.engines.base import ExactText, FreeText, JsonValue
from hpcrl.engines.structure import check_structure
from hpcrl.rollout.agents.answer_parser import AnswerParser
from hpcrl.rollout.agents.reasoning_parsers import REASONING_PARSERS
from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import ModelCall
from hpcrl.rollout.agents.structures import CALL_WRITERS, make_structure
from hpcrl.rollout.agents.tool_families import TOOL_PARSERS
from hpcrl.rollout.agents.tool_parsers import ToolCall, parse_answer

REASONING = {"gpt-oss": "gpt-oss", "deepseek": "think", "glm": "think"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "look_up")]
ARGUMENTS = {"a": 1, "b": 'x "y"\n<z>'}


def make_value(schema, *, tool):
    """Make a value of a schema: arguments, a whole call, or one argument."""
    match schema:
        case {"anyOf": [*calls]}:
            return make_value(next(call for call in calls if tool in str(call)), tool=tool)
        case {"properties": {"name": _, "parameters": _}}:
            return {"name": tool, "parameters": ARGUMENTS}
        case _:
            return ARGUMENTS if schema == PARAMETERS else ARGUMENTS["a"]


def write(parts, *, tool):
    """Write a text that the parts allow: the call of one tool, with every argument, after a thought."""
    text = ""
    for part in parts:
        match part:
            case ExactText(text=exact):
                text += exact
            case JsonValue(schema=schema):
                text += json.dumps(make_value(schema, tool=tool))
            case FreeText(until=until):
                text += ("Hm." if "think" in until else ARGUMENTS["b"]) + until
            case _:
                fitting = [parts for parts in part.alternatives if parts and tool in str(parts)]
                text += write((fitting or part.alternatives)[0], tool=tool)
    return text


@pytest.mark.parametrize("prompt", ["<|assistant|>", "<|assistant|><think>\n"])
@pytest.mark.parametrize("tool", ["add", "look_up"])
@pytest.mark.parametrize("family", CALL_WRITERS)
def test_a_required_call_that_is_written_is_read(family, tool, prompt):
    parser = AnswerParser(tools=TOOL_PARSERS[family], reasoning=REASONING_PARSERS[REASONING.get(family, "none")])
    call = ModelCall(model="hpcrl", tools=TOOLS, must_call=("add", "look_up"))
    turn = TurnPrompt(parent=None, new_token_ids=[], rendered=prompt)
    structure = make_structure(call, turn, parser)
    check_structure(structure)
    text = write(structure.parts, tool=tool)
    content, _, calls = parse_answer(parser.make_reader(call, turn), text)
    assert (content, calls) == ("", [ToolCall(tool, ARGUMENTS)])
