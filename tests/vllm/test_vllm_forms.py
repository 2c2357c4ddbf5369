"""Each form of the model's API on a real vLLM server, streamed and whole: what is sent is what is recorded."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anthropic
import openai
import pytest

from hpcrl.engines.http import RemoteEngine, make_client_session
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents.recording import RecordedTurn
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.episode import EpisodeLimits
from tests.contract.test_engine import CONTEXT
from tests.support.sessions import session_of

if TYPE_CHECKING:
    from tests.support.served import Behind, Place

LIMITS = EpisodeLimits(max_turns=16, max_new_tokens=400, context_length=CONTEXT, max_lag=1)
QUESTION: Any = [{"role": "user", "content": "1+1=?"}]
NUM = 24
CLOSE = 1e-3
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"name": name, "parameters": SCHEMA} for name in ("add", "sub")]
CHAT_TOOLS: Any = [{"type": "function", "function": tool} for tool in TOOLS]
FLAT_TOOLS: Any = [{"type": "function", **tool} for tool in TOOLS]
CLAUDE_TOOLS: Any = [{"name": tool["name"], "input_schema": SCHEMA} for tool in TOOLS]


class Clients(NamedTuple):
    """Clients of one program, and its session."""

    openai: openai.AsyncOpenAI
    claude: anthropic.AsyncAnthropic
    session: ProgramSession


@asynccontextmanager
async def opened(behind: "Behind", model: Path) -> AsyncIterator[Clients]:
    template = load_chat_template(model)
    session = session_of(template, limits=LIMITS)
    async with (
        asyncio.timeout(300),
        make_client_session() as http,
        ModelProxy(RemoteEngine(behind.endpoint, http), template=template) as proxy,
    ):
        key, root = proxy.open(session), proxy.url.removesuffix("/v1")
        async with (
            openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as claude,
        ):
            yield Clients(client, claude, session)


async def ask_chat(clients: Clients, **asked: Any) -> str:
    done = await clients.openai.chat.completions.create(model="hpcrl", messages=QUESTION, max_tokens=NUM, **asked)
    return done.choices[0].message.content or ""


async def stream_chat(clients: Clients) -> str:
    asked: Any = {"model": "hpcrl", "messages": QUESTION, "max_tokens": NUM, "stream": True}
    return "".join(
        [part.choices[0].delta.content or "" async for part in await clients.openai.chat.completions.create(**asked)]
    )


async def ask_text(clients: Clients) -> str:
    done = await clients.openai.completions.create(model="hpcrl", prompt="1+1=", max_tokens=NUM)
    return done.choices[0].text


async def stream_text(clients: Clients) -> str:
    asked: Any = {"model": "hpcrl", "prompt": "1+1=", "max_tokens": NUM, "stream": True}
    return "".join([part.choices[0].text async for part in await clients.openai.completions.create(**asked)])


async def ask_response(clients: Clients) -> str:
    return (await clients.openai.responses.create(model="hpcrl", input="1+1=?", max_output_tokens=NUM)).output_text


async def stream_response(clients: Clients) -> str:
    asked: Any = {"model": "hpcrl", "input": "1+1=?", "max_output_tokens": NUM, "stream": True}
    events = [event async for event in await clients.openai.responses.create(**asked)]
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def ask_message(clients: Clients) -> str:
    done = await clients.claude.messages.create(model="hpcrl", messages=QUESTION, max_tokens=NUM)
    return "".join(block.text for block in done.content if block.type == "text")


async def stream_message(clients: Clients) -> str:
    async with clients.claude.messages.stream(model="hpcrl", messages=QUESTION, max_tokens=NUM) as stream:
        return "".join([text async for text in stream.text_stream])


FORMS: dict[str, Callable[[Clients], Awaitable[str]]] = {
    "chat": ask_chat,
    "streamed-chat": stream_chat,
    "text": ask_text,
    "streamed-text": stream_text,
    "responses": ask_response,
    "streamed-responses": stream_response,
    "messages": ask_message,
    "streamed-messages": stream_message,
}


def score(place: "Place", behind: "Behind", turn: RecordedTurn) -> list[float]:
    """Return vLLM's own log-probabilities of the answer, as those of a prompt that it is given whole."""
    prompt, generated = turn.prompt.token_ids(), turn.completion.token_ids
    body = {"model": "policy", "prompt": [*prompt, *generated], "max_tokens": 1, "prompt_logprobs": 0}
    scored = place.do(behind.engine.server.post("/v1/completions", body))["choices"][0]["prompt_logprobs"]
    return [found[str(token)]["logprob"] for found, token in zip(scored[len(prompt) :], generated, strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_recorded_as_it_was_sampled(
    form: str, pair: "list[Behind]", vllm_place: "Place", slow_model_dir: Path
) -> None:
    async def body() -> tuple[str, RecordedTurn]:
        async with opened(pair[0], slow_model_dir) as clients:
            text = ""
            while not text:  # the first token that is sampled may be the last one
                text = await FORMS[form](clients)
            return text, clients.session.recording.turns[-1]

    text, turn = asyncio.run(body())
    assert turn.is_trained
    assert text == load_chat_template(slow_model_dir).decode(turn.completion.token_ids) != ""
    assert turn.completion.logprobs == pytest.approx(score(vllm_place, pair[0], turn), abs=CLOSE)


def test_the_log_probabilities_that_a_client_asks_for_are_those_recorded(
    pair: "list[Behind]", slow_model_dir: Path
) -> None:
    async def body() -> None:
        async with opened(pair[0], slow_model_dir) as clients:
            done = await clients.openai.chat.completions.create(
                model="hpcrl", messages=QUESTION, max_tokens=NUM, logprobs=True, top_logprobs=2
            )
            shown = done.choices[0].logprobs
            assert shown is not None
            assert shown.content is not None
            (turn,) = clients.session.recording.turns
            assert [entry.logprob for entry in shown.content] == turn.completion.logprobs
            assert all(len(entry.top_logprobs) == 2 for entry in shown.content)

    asyncio.run(body())


async def call_chat(clients: Clients, name: str) -> tuple[str, Any]:
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    asked: Any = {"model": "hpcrl", "messages": QUESTION, "tools": CHAT_TOOLS, "tool_choice": choice}
    done = await clients.openai.chat.completions.create(**asked, parallel_tool_calls=False)
    (call,) = done.choices[0].message.tool_calls or []
    return call.function.name, json.loads(call.function.arguments)


async def call_streamed_chat(clients: Clients, name: str) -> tuple[str, Any]:
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    asked: Any = {"model": "hpcrl", "messages": QUESTION, "tools": CHAT_TOOLS, "tool_choice": choice}
    parts = await clients.openai.chat.completions.create(**asked, parallel_tool_calls=False, stream=True)
    calls = [call.function async for part in parts for call in part.choices[0].delta.tool_calls or []]
    return "".join(call.name or "" for call in calls), json.loads("".join(call.arguments or "" for call in calls))


async def call_response(clients: Clients, name: str) -> tuple[str, Any]:
    choice: Any = {"type": "function", "name": name} if name else "required"
    asked: Any = {"model": "hpcrl", "input": "1+1=?", "tools": FLAT_TOOLS, "tool_choice": choice}
    done = await clients.openai.responses.create(**asked, parallel_tool_calls=False)
    return done.output[-1].name, json.loads(done.output[-1].arguments)


async def call_message(clients: Clients, name: str) -> tuple[str, Any]:
    choice: Any = {"type": "tool", "name": name} if name else {"type": "any"}
    choice["disable_parallel_tool_use"] = True
    asked: Any = {"model": "hpcrl", "messages": QUESTION, "max_tokens": 300}
    done = await clients.claude.messages.create(**asked, tools=CLAUDE_TOOLS, tool_choice=choice)
    block: Any = done.content[-1]
    return block.name, block.input


CALLS = {
    "chat": call_chat,
    "streamed-chat": call_streamed_chat,
    "responses": call_response,
    "messages": call_message,
}


@pytest.mark.parametrize("name", ["", "sub"], ids=["required", "named"])
@pytest.mark.parametrize("form", CALLS)
def test_a_model_that_writes_noise_calls_a_tool_that_it_must_call(
    form: str, name: str, pair: "list[Behind]", slow_model_dir: Path
) -> None:
    async def body() -> tuple[tuple[str, Any], list[RecordedTurn]]:
        async with opened(pair[0], slow_model_dir) as clients:
            return await CALLS[form](clients, name), clients.session.recording.turns

    (called, arguments), (turn,) = asyncio.run(body())
    assert called in ([name] if name else ["add", "sub"])
    assert arguments in [{"a": 1}, {"a": 2}]
    assert turn.is_trained
    assert turn.completion.logprobs[:9] == pytest.approx([0.0] * 9, abs=CLOSE), "only one text was allowed"
    assert sum(turn.completion.logprobs) < -CLOSE, "it had a choice later on"


@pytest.mark.parametrize("form", ["chat", "responses"])
def test_a_schema_holds_whatever_the_model_would_write(form: str, pair: "list[Behind]", slow_model_dir: Path) -> None:
    wanted: Any = {"name": "sum", "schema": SCHEMA, "strict": True}

    async def body() -> str:
        async with opened(pair[0], slow_model_dir) as clients:
            if form == "chat":
                asked: Any = {"type": "json_schema", "json_schema": wanted}
                done = await clients.openai.chat.completions.create(
                    model="hpcrl", messages=QUESTION, response_format=asked
                )
                return done.choices[0].message.content or ""
            text: Any = {"format": {"type": "json_schema", **wanted}}
            return (await clients.openai.responses.create(model="hpcrl", input="1+1=?", text=text)).output_text

    assert json.loads(asyncio.run(body())) in [{"a": 1}, {"a": 2}]
