"""The `litellm` package: a required tool call in OpenAI's form, then its result in Anthropic's."""

import json
import os

import litellm
from sums_task import QUESTION, print_reward, read_sum, score_sum

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    },
}

first, second = read_sum()
model = os.environ["OPENAI_MODEL"]
messages = [{"role": "user", "content": QUESTION.format(first, second)}]
asked = litellm.completion(model=f"openai/{model}", messages=messages, tools=[TOOL], tool_choice="required")
message = asked.choices[0].message
messages.append(message.model_dump(exclude_none=True))
total = None
for call in message.tool_calls or []:
    arguments = json.loads(call.function.arguments)
    total = arguments["a"] + arguments["b"]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
if total is None:  # the length limit has cut the call off: a message of the user must come next
    messages.append({"role": "user", "content": "No call."})
litellm.completion(model=f"anthropic/{model}", messages=messages, tools=[TOOL], max_tokens=32)
print_reward(score_sum(total, first + second))
