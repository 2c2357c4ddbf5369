"""The CodeAgent of smolagents, which writes Python; it starts again after an answer without code."""

import os

from smolagents import CodeAgent, OpenAIServerModel
from sums_task import print_reward, read_sum, score_sum

first, second = read_sum()
model = OpenAIServerModel(model_id=os.environ["OPENAI_MODEL"])
agent = CodeAgent(tools=[], model=model, max_steps=1)
print_reward(score_sum(agent.run(f"What is {first} + {second}?"), first + second))
