"""LangGraph's ReAct agent with a tool and a structured answer at the end."""

import os
import warnings

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field
from sums_task import QUESTION, print_reward, read_sum, score_sum

warnings.simplefilter("ignore")
from langgraph.prebuilt import create_react_agent  # noqa: E402


class SumAnswer(BaseModel):
    total: int = Field(ge=0, le=99)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


first, second = read_sum()
agent = create_react_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [add], response_format=SumAnswer)
try:
    state = agent.invoke({"messages": [("user", QUESTION.format(first, second))]}, {"recursion_limit": 8})
    total = state["structured_response"].total
except (ValueError, LengthFinishReasonError):  # the length limit has cut the last answer off
    total = None
print_reward(score_sum(total, first + second))
