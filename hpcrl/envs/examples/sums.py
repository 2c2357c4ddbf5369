"""An agent program that does sums with the `openai` package alone: `python -m hpcrl.envs.examples.sums`.

It reads {"seed": ..., "max_operand": ...}, asks the model, gives it a second attempt, and prints its reward.
"""

import json
import os
import random
import sys

from openai import OpenAI


def main() -> int:
    task = json.loads(sys.stdin.read())
    draw = random.Random(task["seed"])
    first, second = (draw.randint(0, task.get("max_operand", 4)) for _ in range(2))
    client = OpenAI(max_retries=1)  # the address is in OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": f"{first}+{second}=?"}]
    reward = 0.0
    for share in (1.0, 0.5):
        answer = request_answer(client, messages)
        if answer.strip() == str(first + second):
            reward = share
            break
        reward = 0.1 if answer.strip().isdecimal() else reward
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "wrong"}]
    print(json.dumps({"reward": reward}))  # noqa: T201 - its output is its reward
    return 0


def request_answer(client: OpenAI, messages: list[dict[str, str]]) -> str:
    """Return the model's next answer."""
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    return answer.choices[0].message.content or ""


if __name__ == "__main__":
    sys.exit(main())
