"""The ToolCallingAgent of smolagents, whose every answer must be a call."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from sums_task import QUESTION, print_reward, read_sum, score_sum


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


first, second = read_sum()
model = OpenAIServerModel(model_id=os.environ["OPENAI_MODEL"])
agent = ToolCallingAgent(tools=[add], model=model, max_steps=2)
print_reward(score_sum(agent.run(QUESTION.format(first, second)), first + second))
