"""The choice of parsers by a chat template, and tool loops of families with the parsers that are chosen."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpcrl.config.recipe import REASONING_PARSER_NAMES, TOOL_PARSER_NAMES, EngineConfig, ModelConfig
from hpcrl.engines.vllm import parsers
from hpcrl.envs import check
from hpcrl.errors import ConfigError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.roles.program_proxy import choose_parser
from hpcrl.rollout.agents.answer_parser import AnswerParser, WholeReader, add_call_form, choose_parsers
from hpcrl.rollout.agents.reasoning_parsers import REASONING_PARSERS
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.agents.tool_families import CALL_FORMS, TOOL_PARSERS
from hpcrl.rollout.agents.tool_parsers import parse_answer
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.testing.model_templates import FAMILIES, save_family
from tests.support.plans import make_recipe
from tests.support.scripted import ScriptedModel
from tests.support.sessions import session_of

openai = pytest.importorskip("openai")
CHOICES = {
    "Qwen2.5": ("hermes", "none"),
    "Qwen3": ("hermes", "think"),
    "Qwen3, no thinking": ("hermes", "think"),
    "Qwen3-2507 instruct": ("hermes", "none"),
    "Qwen3-2507 thinking": ("hermes", "think"),
    "Qwen3.5": ("qwen3-coder", "think"),
    "Qwen3.5, no thinking": ("qwen3-coder", "think"),
    "Llama-3.1, 3.3": ("llama", "none"),
    "Mistral-Small": ("mistral", "none"),
    "Gemma-2": ("gemma", "none"),
    "Gemma-3": ("gemma", "none"),
    "Aya Expanse": ("hermes", "none"),  # whose templates write no calls, like that of Phi-4
    "Tiny Aya": ("hermes", "none"),
    "DeepSeek-V3": ("deepseek", "think"),  # the template of the tests is one for V3 and R1
    "DeepSeek-R1": ("deepseek", "think"),
    "GLM-4.5": ("glm", "think"),
    "gpt-oss": ("gpt-oss", "gpt-oss"),
    "Phi-4": ("hermes", "none"),
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]
QUESTION = [{"role": "user", "content": "Look twice."}]
LIMITS = EpisodeLimits(max_turns=8, max_new_tokens=64, context_length=4096, max_lag=1)


@pytest.mark.parametrize(("name", "parsers"), CHOICES.items())
def test_the_template_of_a_family_decides_its_parsers(name, parsers):
    choice = choose_parsers(FAMILIES[name].template, EngineConfig())
    assert (choice.tool_parser, choice.reasoning_parser) == parsers


@pytest.mark.parametrize(
    ("name", "engine", "form"), [("Gemma-3", {}, "gemma"), ("Phi-4", {"tool_parser": "phi"}, "phi")]
)
def test_calls_are_written_in_the_form_that_is_read(tmp_path, name, engine, form):
    template = add_call_form(load_chat_template(save_family(tmp_path, FAMILIES[name])), EngineConfig(**engine))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
    rendered = template.render([*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, *QUESTION])
    assert CALL_FORMS[form].write("look", {"x": 1}) in rendered


def test_the_recipe_overrides_the_template():
    engine = EngineConfig(tool_parser="pythonic", reasoning_parser="none")
    choice = choose_parsers(FAMILIES["Qwen3"].template, engine)
    assert choice == ("pythonic", "none", "tool calls by the recipe, thoughts by the recipe")


def test_a_template_without_marks_gets_the_default():
    choice = choose_parsers("{{ messages }}", EngineConfig())
    assert choice[:2] == ("hermes", "none")
    assert "default" in choice.reason


def test_the_names_that_a_recipe_may_give_are_those_of_the_parsers():
    assert set(TOOL_PARSER_NAMES) == set(TOOL_PARSERS)
    assert set(REASONING_PARSER_NAMES) == set(REASONING_PARSERS)


WITHOUT_EMPTY_THOUGHTS = {"Qwen3, no thinking"}
"""Families whose prompts end with empty thoughts that the history leaves out: every turn starts a conversation."""
UNOPENED_THOUGHTS = {"DeepSeek-R1"}
"""Families whose prompts open no thoughts after a tool's result."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_loop_of_a_family_continues_the_recorded_turns(tmp_path, name):
    family = FAMILIES[name]
    later = replace(family, thought="") if name in UNOPENED_THOUGHTS else family
    words = [family.write_call("look", {"x": 1}), later.write_call("look", {"x": 2}), later.write_answer("Done.")]
    (seen, answer), recording = call_model(tmp_path, family, words, loop)
    assert seen == [("look", {"x": 1}), ("look", {"x": 2})]
    assert answer == "Done."
    parents = [turn.prompt.parent for turn in recording.turns]
    assert parents == ([None] * 3 if name in WITHOUT_EMPTY_THOUGHTS else [None, *recording.turns[:2]])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_length_limit_cut_off_is_content(tmp_path, name, stream):
    family = FAMILIES[name]
    called = replace(family, thought="").write_call("look", {"x": 1})
    cut = called[: called.index("look") + 6]

    async def ask(client):
        answer = await client.chat.completions.create(model="hpcrl", messages=QUESTION, tools=TOOLS, stream=stream)
        if not stream:
            choice = answer.choices[0]
            return choice.message.content, choice.message.tool_calls, choice.finish_reason
        chunks = [chunk.choices[0] async for chunk in answer]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        return content, next((c.delta.tool_calls for c in chunks if c.delta.tool_calls), None), chunks[-1].finish_reason

    thought = family.thought.format("Hm.")
    (content, calls, finish_reason), _ = call_model(tmp_path, family, [thought + cut], ask)
    assert (calls, finish_reason) == (None, "length")
    assert "look" in content or name == "gpt-oss"  # the header of a message belongs to no text


def call_model(directory, family, words, talk):
    """Return the result of `talk` with a client of a model that generates these words, and what was recorded."""

    async def run():
        template = load_chat_template(
            save_family(directory, family), ModelConfig(chat_template_kwargs=dict(family.kwargs))
        )
        session = session_of(template, limits=LIMITS)
        parser = AnswerParser.from_choice(choose_parsers(template.text, EngineConfig()), template, directory)
        async with (
            ModelProxy(ScriptedModel(template, *words), template=template, parser=parser) as proxy,
            openai.AsyncOpenAI(base_url=proxy.url, api_key=proxy.open(session), max_retries=0) as client,
        ):
            return await talk(client), session.recording

    return asyncio.run(run())


async def loop(client):
    """Call tools for as long as the model does; return the calls and the last answer."""
    messages, seen = list(QUESTION), []
    for _ in range(5):
        answer = await client.chat.completions.create(model="hpcrl", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return seen, message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            seen.append((call.function.name, json.loads(call.function.arguments)))
            messages.append({"role": "tool", "content": "5", "tool_call_id": call.id})
    raise AssertionError(messages)


def test_an_answer_that_a_foreign_parser_cannot_read_is_content():
    def fail(text):
        raise KeyError(text)

    reader = WholeReader(fail)
    assert parse_answer(reader, "some text") == ("some text", "", [])


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_a_parser_of_vllm_is_refused_where_vllm_is_not_installed(tmp_path, monkeypatch, setting):
    for module in (check, parsers):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"engine.{setting} = 'vllm:hermes' needs the package vllm"):
        check.check_packages(make_recipe(f'engine.{setting}="vllm:hermes"'))
    with pytest.raises(ConfigError, match=f"^judge.grader.engine.{setting} = 'vllm:hermes' needs the package vllm"):
        check.check_packages(make_recipe("judge.grader.path=/m", f'judge.grader.engine.{setting}="vllm:hermes"'))
    template = load_chat_template(save_family(tmp_path, FAMILIES["Qwen3"]))
    choice = choose_parsers(template.text, EngineConfig(**{setting: "vllm:hermes"}))
    with pytest.raises(ConfigError, match=f"engine.{setting} = 'vllm:hermes' needs the package vllm"):
        AnswerParser.from_choice(choice, template, tmp_path)


def test_one_env_worker_reports_the_parsers_that_it_chose(tmp_path):
    template = load_chat_template(save_family(tmp_path, FAMILIES["GLM-4.5"]))
    events = []
    for index in (0, 1):
        context = SimpleNamespace(
            index=index,
            recipe=make_recipe(),
            events=SimpleNamespace(emit=events.append),
            campaign=SimpleNamespace(model=tmp_path),
        )
        assert choose_parser(context, template).tools is TOOL_PARSERS["glm"]
    (event,) = events
    assert (event.tool_parser, event.reasoning_parser) == ("glm", "think")
    assert "<arg_key> in the chat template" in event.reason
