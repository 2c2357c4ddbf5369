"""The model's API over a scripted model, for tests of agent programs' calls."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import openai

from hpcrl.engines.base import CompletionChunk, join_chunks
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.episode import EpisodeLimits
from tests.support.reported_experts import report_experts
from tests.support.sessions import session_of

LIMITS = EpisodeLimits(max_turns=8, max_new_tokens=64, context_length=128, max_lag=1)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QUESTION = [{"role": "user", "content": "1+1=?"}]


class ScriptedModel:
    """Generates these words, one per request; an exception is raised, None hangs, a list is streamed in chunks."""

    def __init__(self, template, *words):
        self.template = template
        self.words = list(words)
        self.requests = []
        self.hung = asyncio.Event()
        self.ended = asyncio.Event()

    def part(self, text, *, finish_reason=None):
        ids = self.template.encode(text)
        tops = [{token: -0.5, 0: -3.0} for token in ids] if self.requests[-1].top_logprobs else []
        return CompletionChunk(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[0] * len(ids),
            finish_reason=finish_reason,
            top=tops,
        )

    async def generate(self, request):
        parts = [part async for part in self.stream(request)]
        return join_chunks(parts)

    async def stream(self, request):
        self.requests.append(request)
        word, read = self.words.pop(0), list(request.token_ids)

        def report(part):
            """Report the experts of what was read for this part, as an engine that streams does."""
            start = request.experts_from if len(read) == len(request.token_ids) else len(read) - 1
            read.extend(part.token_ids)
            spans = [] if request.experts_from is None else report_experts(read, start)
            return msgspec.structs.replace(part, experts=spans)

        try:
            for piece in word[:-1] if isinstance(word, list) else []:
                yield report(self.part(piece))
            match word[-1] if isinstance(word, list) else word:
                case None:
                    self.hung.set()
                    await asyncio.Event().wait()
                case Exception() as error:
                    raise error
                case last:
                    yield report(self.part(last, finish_reason="stop" if last.endswith("<eos>") else "length"))
        finally:
            self.ended.set()


@asynccontextmanager
async def opened(template, *words, proxy_options=None, **changed):
    """Yield a client with its session, policy and proxy."""
    policy = ScriptedModel(template, *words)
    session = session_of(template, **({"limits": LIMITS} | changed))
    async with ModelProxy(policy, template=template, **(proxy_options or {})) as proxy:
        client = openai.AsyncOpenAI(base_url=proxy.url, api_key=proxy.open(session), max_retries=0)
        client.session, client.policy, client.proxy = session, policy, proxy
        async with client:
            yield client
