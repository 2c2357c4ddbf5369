"""Agent programs for tests: a scripted model, and one way to play an episode of a program made of a piece of code."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.isolation.sandbox import SandboxChoice, choose_sandbox
from hpcrl.errors import EngineError, EnvFault
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.program import run_program
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.rollout.tasks import AgentTask
from hpcrl.spool.record import Trajectory
from tests.support.completions import make_completion

TASK = AgentTask(domain="sums", number=1, seed=5)
ASK = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.read())
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + path
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)
def ask(text):
    messages = [{"role": "user", "content": text}]
    return post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": messages})
"""


def bubblewrap_works() -> bool:
    try:
        return choose_sandbox("bubblewrap", image=None) == "bubblewrap"
    except EnvFault:
        return False


needs_bubblewrap = pytest.mark.skipif(not bubblewrap_works(), reason="needs bubblewrap and user namespaces")


class OneWordModel:
    """A model that always generates the same word, or fails."""

    def __init__(self, template: ChatTemplate, word: str = "=2<eos>", *, error: EngineError | None = None) -> None:
        self.template, self.word, self.error = template, word, error

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.error is not None:
            raise self.error
        ids = self.template.encode(self.word)
        return make_completion(ids)


def play(
    template: ChatTemplate,
    code: str,
    *,
    sandbox: SandboxChoice = "none",
    newest: Callable[[], int] = lambda: 0,
    word: str = "=2<eos>",
    error: EngineError | None = None,
    retries: int = 0,
    limits: dict[str, Any] | None = None,
    **options: Any,
) -> Trajectory:
    """Run a program made of `code` and return its trajectory."""
    command = ["python", "-c", ASK + code]
    bounds: dict[str, Any] = {
        "max_turns": 4,
        "max_new_tokens": 8,
        "context_length": 64,
        "max_lag": 1,
        "env_retries": retries,
    }

    async def run() -> Trajectory:
        async with (
            asyncio.timeout(240),
            ModelProxy(OneWordModel(template, word, error=error), template=template) as proxy,
        ):
            return await run_program(
                TASK,
                index=0,
                make_program=lambda: AgentProgram(command=command, sandbox=sandbox, **options),
                proxy=proxy,
                limits=EpisodeLimits(**(bounds | {"first_pause_s": 0.001} | (limits or {}))),
                newest_version=newest,
                producer="000-env-0",
            )

    return asyncio.run(run())
