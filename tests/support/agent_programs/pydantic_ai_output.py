"""pydantic-ai with structured output: its final answer must be a call with arguments of the type."""

import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from sums_task import QUESTION, print_reward, read_sum, score_sum


class SumAnswer(BaseModel):
    total: int = Field(ge=0, le=99)


first, second = read_sum()
agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), output_type=SumAnswer, instructions="Be exact.")
try:
    reward = score_sum(agent.run_sync(QUESTION.format(first, second)).output.total, first + second)
except UnexpectedModelBehavior:
    reward = 0.0
print_reward(reward)
