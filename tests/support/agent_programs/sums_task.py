"""The task of the programs in this folder: a sum of two digits. They import nothing of hpcrl.

read_sum     read the two numbers from the task on standard input
QUESTION     the question, with their places
score_sum    the reward: 1 for the right sum, less for another number, a little for the digits of a text
print_reward print it as the last line
"""

import json
import random
import sys

QUESTION = "What is {} + {}? Use the tool add."


def read_sum() -> tuple[int, int]:
    draw = random.Random(json.loads(sys.stdin.read())["seed"])
    return draw.randint(0, 9), draw.randint(0, 9)


def score_sum(answer: object, expected: int) -> float:
    text = str(answer)
    try:
        return 1 / (1 + abs(int(text) - expected))
    except ValueError:
        return 0.1 * sum(character.isdecimal() for character in text) / max(len(text), 1)


def print_reward(reward: float) -> None:
    print(json.dumps({"reward": reward}))
