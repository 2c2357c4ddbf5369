"""The OpenAI Agents SDK in its default mode, the API of responses: an agent with a tool that it must call first."""

import os

from agents import Agent, AgentsException, ModelSettings, Runner, function_tool
from sums_task import QUESTION, print_reward, read_sum, score_sum


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


first, second = read_sum()
agent = Agent(
    name="calculator",
    instructions="Answer with the number alone.",
    tools=[add],
    model=os.environ["OPENAI_MODEL"],
    model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
)
try:
    reward = score_sum(Runner.run_sync(agent, QUESTION.format(first, second), max_turns=3).final_output, first + second)
except AgentsException:  # too many turns, or arguments that are none
    reward = 0.0
print_reward(reward)
