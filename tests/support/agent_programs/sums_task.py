"""The task of the programs in this folder: a sum of two digits. They import nothing of hpcrl.

read_sum     read the two numbers from the task on standard input
QUESTION     the question, with their places
score_sum    the reward: most for the right sum, little for another number, nothing for none
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
    try:
        return 1.0 if int(str(answer)) == expected else 0.1
    except ValueError:
        return 0.0


def print_reward(reward: float) -> None:
    print(json.dumps({"reward": reward}))
