"""The `openai` package alone: a tool loop whose first answer must be a call, then an answer that must be JSON."""

import json
import os

from openai import OpenAI
from sums_task import QUESTION, print_reward, read_sum, score_sum

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "sum",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"total": NUMBER},
            "required": ["total"],
            "additionalProperties": False,
        },
    },
}

first, second = read_sum()
client, model = OpenAI(), os.environ["OPENAI_MODEL"]
messages = [{"role": "user", "content": QUESTION.format(first, second)}]
message = (
    client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    .choices[0]
    .message
)
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or []:
    arguments = json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])})
answer = client.chat.completions.create(model=model, messages=messages, response_format=FORM).choices[0].message
try:
    total = json.loads(answer.content)["total"]
except ValueError:  # the length limit has cut it off
    total = None
print_reward(score_sum(total, first + second))
