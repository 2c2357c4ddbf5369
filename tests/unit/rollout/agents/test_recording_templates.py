"""Recording with the templates of current families: which turns are continued, and that all prompts are exact."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config.recipe import ModelConfig
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.models.chat_template import AnsweredPrompt, ChatTemplate
from hpcrl.rollout.agents import recording
from hpcrl.rollout.agents.recording import ConversationRecording, RecordedTurn
from hpcrl.rollout.agents.tool_families import CALL_FORMS
from hpcrl.testing.model_templates import FAMILIES, save_family
from tests.support.completions import make_completion

RULES, QUESTION = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where to?"}
AGAIN = {"role": "user", "content": "And now?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = {"id": "abcdef012", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
CALLED, ANSWERED = {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "assistant", "content": "Left."}
RESULT = {"role": "tool", "content": "a wall", "tool_call_id": CALL["id"]}
CONTINUES = {  # after a tool's result, after the user's next question
    "Qwen2.5": (True, True),
    "Qwen3": (True, False),
    "Qwen3, no thinking": (False, False),
    "Qwen3-2507 instruct": (True, True),
    "Qwen3-2507 thinking": (True, False),
    "Qwen3.5": (True, False),
    "Qwen3.5, no thinking": (True, False),
    "Llama-3.1, 3.3": (True, True),
    "Mistral-Small": (True, False),
    "Gemma-2": (True, True),
    "Gemma-3": (True, True),
    "Aya Expanse": (True, True),
    "Tiny Aya": (True, True),
    "Phi-4": (True, True),
    "DeepSeek-V3": (True, True),
    "DeepSeek-R1": (True, False),
    "GLM-4.5": (True, False),
    "gpt-oss": (True, False),
}


def load(tmp_path: Path, name: str) -> ChatTemplate:
    config = ModelConfig(chat_template_kwargs=dict(FAMILIES[name].kwargs))
    template = load_chat_template(save_family(tmp_path, FAMILIES[name]), config)
    call_form = CALL_FORMS["gemma" if name.startswith("Gemma") else "hermes"]
    return replace(template, form=msgspec.structs.replace(template.form, call_form=call_form))


def record(
    recording: ConversationRecording,
    template: ChatTemplate,
    messages: list[Any],
    generated: str,
    *,
    answer: Any,
    **more: Any,
) -> RecordedTurn:
    """Record the answer `generated`, special tokens included, which the client receives as `answer`."""
    prompt = recording.chat_prompt(messages, tools=more.pop("tools", None), **more)
    ids = template.encode(generated)
    completion = make_completion(ids, version=1)
    return recording.record_answer(prompt, completion, answer=answer, is_trained=True, started_at=0.0, generate_s=0.0)


def thinking(template: ChatTemplate, name: str, message: Any) -> Any:
    """Return an answer as a client that keeps thoughts sends it."""
    if not FAMILIES[name].thought or message["role"] != "assistant":
        return message
    if template.form.has_thought_fields:
        return {**message, "reasoning_content": "mm"}
    return {**message, "content": "<think>\nmm\n</think>\n\n"} if "tool_calls" in message else message


@pytest.mark.parametrize("name", CONTINUES)
def test_each_prompt_of_a_tool_conversation_is_what_a_server_would_render(tmp_path: Path, name: str) -> None:
    """The answers are written as the template writes them, so that rendering all of it again gives the same ids."""
    family, template = FAMILIES[name], load(tmp_path, name)
    recording = ConversationRecording(template)
    messages = [RULES, QUESTION]
    first = record(recording, template, messages, family.write_call("look", {"x": 1}), answer=CALLED, tools=TOOLS)
    messages = [*messages, CALLED, RESULT]
    second = record(recording, template, messages, family.write_answer("Left."), answer=ANSWERED, tools=TOOLS)
    third = recording.chat_prompt([*messages, ANSWERED, AGAIN], tools=TOOLS)
    wanted = [[RULES, QUESTION], [RULES, QUESTION, CALLED, RESULT], [RULES, QUESTION, CALLED, RESULT, ANSWERED, AGAIN]]
    for prompt, sent in zip((first.prompt, second.prompt, third), wanted, strict=True):
        conversation = sent if prompt.parent is None else [thinking(template, name, message) for message in sent]
        expected = template.encode(template.render(conversation, tools=TOOLS))
        assert template.decode_all(prompt.token_ids()) == template.decode_all(expected)
        assert prompt.token_ids() == expected
    assert (second.prompt.parent is first, third.parent is second) == CONTINUES[name]


@pytest.mark.parametrize(
    "generated",
    [
        "<think>\nmm\n</think>\nLeft.<|im_end|>",
        "<think>\nmm\n\n</think>\n\n\nLeft.\n<|im_end|>",
        "<think></think>Left.<|im_end|>",
        "<think>\n\n</think>\n\nLeft.<|im_end|>",
        "<think>mm</think>Left.<|endoftext|>",
        "<think>\nmm\n</think>\n\nLeft.",
    ],
)
def test_a_newline_that_the_model_chose_does_not_start_a_branch(tmp_path: Path, generated: str) -> None:
    template = load(tmp_path, "Qwen3")
    recording = ConversationRecording(template)
    turn = record(recording, template, [QUESTION], generated, answer=CALLED)
    prompt = recording.chat_prompt([QUESTION, CALLED, RESULT], tools=None)
    assert prompt.parent is turn
    assert prompt.token_ids()[: len(turn.token_ids())] == turn.token_ids()
    added = template.decode_all(prompt.new_token_ids)
    assert added.count("<|im_end|>") == (1 if generated.endswith("<|im_end|>") else 2), added


def test_the_history_of_gpt_oss_has_no_token_that_is_only_generated(tmp_path: Path) -> None:
    """Its template writes <|end|> where the model generated <|return|>, also after an answer without a thought."""
    template = load(tmp_path, "gpt-oss")
    recording = ConversationRecording(template)
    turn = record(recording, template, [QUESTION], "<|channel|>final<|message|>Left.<|return|>", answer=ANSWERED)
    prompt = recording.chat_prompt([QUESTION, ANSWERED, AGAIN], tools=None)
    assert turn.completion.token_ids[-1] == template.mark_ids["<|return|>"]
    assert template.mark_ids["<|return|>"] not in prompt.token_ids()
    assert prompt.token_ids() == template.encode(template.render([QUESTION, ANSWERED, AGAIN]))


@pytest.mark.parametrize("name", ["Gemma-3", "Tiny Aya", "Qwen2.5"])
def test_another_message_of_the_model_after_its_answer_reaches_the_prompt(tmp_path: Path, name: str) -> None:
    family, template = FAMILIES[name], load(tmp_path, name)
    recording = ConversationRecording(template)
    record(recording, template, [QUESTION], family.write_answer("Left."), answer=ANSWERED)
    sent = [QUESTION, ANSWERED, {**ANSWERED, "content": "No, right."}]
    for messages in (sent, [*sent, AGAIN]):
        prompt = recording.chat_prompt(messages, tools=None)
        assert prompt.token_ids() == template.encode(template.render(messages))
        assert "No, right." in template.decode_all(prompt.token_ids())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.thought])
@pytest.mark.parametrize("question", ["And now?", "<tool_response>\na wall\n</tool_response>"])
@pytest.mark.parametrize("keeps_thoughts", [False, True])
def test_a_thought_that_was_cut_off_is_in_the_next_prompt_as_the_template_has_it(
    tmp_path: Path, name: str, question: str, keeps_thoughts: bool
) -> None:
    """After what looks like a tool's result, some templates keep the thought, and close it."""
    template = load(tmp_path, name)
    recording = ConversationRecording(template)
    answer = {**ANSWERED, "content": "", "reasoning_content": "so m"}
    generated = FAMILIES[name].thought.partition("{}")[0] + "so m"
    record(recording, template, [QUESTION], generated, answer=answer)
    sent = [QUESTION, answer if keeps_thoughts else {**ANSWERED, "content": ""}, {**AGAIN, "content": question}]
    prompt = recording.chat_prompt(sent, tools=None)
    assert template.decode_all(prompt.token_ids()) == template.render(sent)


def test_an_answer_that_the_template_trims_is_continued(tmp_path: Path) -> None:
    template = load(tmp_path, "Llama-3.1, 3.3")
    recording = ConversationRecording(template)
    turn = record(recording, template, [QUESTION], "Left.\n\n<|eot_id|>", answer={**ANSWERED, "content": "Left.\n\n"})
    assert recording.chat_prompt([QUESTION, ANSWERED, AGAIN], tools=None).parent is turn


def test_an_answer_with_two_calls_of_llama_is_continued_and_may_be_edited(tmp_path: Path) -> None:
    template = load(tmp_path, "Llama-3.1, 3.3")
    recording = ConversationRecording(template)
    other = {**CALL, "id": "abcdef013", "function": {"name": "listen", "arguments": {}}}
    called = {**CALLED, "tool_calls": [CALL, other]}
    other_result = {**RESULT, "content": "a bell", "tool_call_id": other["id"]}
    written = '{"name": "look", "parameters": {"x": 1}}; {"name": "listen", "parameters": {}}<|eot_id|>'
    turn = record(recording, template, [RULES, QUESTION], written, answer=called, tools=TOOLS)
    sent = [QUESTION, called, RESULT, other_result]
    prompt = recording.chat_prompt([RULES, *sent], tools=TOOLS)
    assert prompt.parent is turn
    new = template.decode_all(prompt.new_token_ids)
    assert "listen" not in new, "the answer is in the prompt as it was generated, not once more"
    assert "a wall" in new
    assert "a bell" in new
    edited = recording.chat_prompt([{**RULES, "content": "Be quick."}, *sent], tools=TOOLS)
    assert edited.parent is None
    assert edited.rendered.index("a wall") < edited.rendered.index('"listen"') < edited.rendered.index("a bell")


def test_a_long_tool_loop_of_a_thinking_model_is_one_conversation(tmp_path: Path) -> None:
    family, template = FAMILIES["Qwen3"], load(tmp_path, "Qwen3")
    recording = ConversationRecording(template)
    messages: list[Any] = [QUESTION]
    for number in range(8):
        generated = family.write_call("look", {"x": 1}, thought="m" * number)
        record(recording, template, messages, generated, answer=CALLED)
        messages = [*messages, CALLED, RESULT]
    assert [turn.prompt.parent for turn in recording.turns] == [None, *recording.turns[:-1]]


def test_a_request_may_switch_thinking_off(tmp_path: Path) -> None:
    template = load(tmp_path, "Qwen3")
    recording = ConversationRecording(template)
    prompt = recording.chat_prompt([QUESTION], tools=None, template_kwargs={"enable_thinking": False})
    assert template.decode_all(prompt.token_ids()).endswith("<think>\n\n</think>\n\n")


def test_a_huge_message_is_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = load(tmp_path, "Qwen2.5")
    recording = ConversationRecording(template)
    huge = {"role": "user", "content": "a word <|im_end|> and another " * 10_000}
    turn = record(recording, template, [huge], "Left.<|im_end|>", answer=ANSWERED)
    encoded: list[str] = []
    encode = ChatTemplate.encode_marks
    monkeypatch.setattr(ChatTemplate, "encode_marks", lambda self, text: [encoded.append(text), encode(self, text)][1])
    assert recording.chat_prompt([huge, ANSWERED, AGAIN], tools=None).parent is turn
    assert max(map(len, encoded)) < 200


# ---- long conversations, of which only a part is rendered


def play_long(template: ChatTemplate, name: str, *, tools: Any) -> list[RecordedTurn]:
    """Record 24 turns: tool calls, answers, and questions of the user, in a changing order."""
    family, recording = FAMILIES[name], ConversationRecording(template)
    messages: list[Any] = [RULES, QUESTION]
    for number in range(24):
        if tools and number % 7 < 5:
            generated, answer, new = (
                family.write_call("look", {"x": 1}),
                CALLED,
                {**RESULT, "content": f"wall {number}"},
            )
        else:
            generated, answer, new = (
                family.write_answer(f"Left {number}."),
                {**ANSWERED, "content": f"Left {number}."},
                AGAIN,
            )
        record(recording, template, messages, generated, answer=answer, tools=tools)
        messages = [*messages, answer, new]
    return recording.turns


def summarise(turns: list[RecordedTurn]) -> list[Any]:
    return [(turn.prompt.token_ids(), turn.prompt.parent and turn.prompt.parent.number) for turn in turns]


@pytest.mark.parametrize("name", FAMILIES)
def test_rendering_a_part_gives_the_ids_of_rendering_all(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = None if name in ("Gemma-3", "Phi-4") else TOOLS
    template = load(tmp_path, name)
    quick = play_long(template, name, tools=tools)
    assert any(template.known_excerpts.values())
    monkeypatch.setattr(recording, "AnsweredPrompt", lambda **more: AnsweredPrompt(**{**more, "num_messages": 0}))
    monkeypatch.setattr(ChatTemplate, "render_longer", lambda *_, **__: None)
    assert summarise(quick) == summarise(play_long(template, name, tools=tools))


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3", "Qwen3.5", "DeepSeek-R1", "GLM-4.5", "gpt-oss"])
@pytest.mark.parametrize("num_calls", [0, 2])
def test_a_call_renders_no_more_messages_in_a_long_conversation(
    tmp_path: Path, name: str, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user asks again after each answer, which may have tool calls before it; thoughts are left out by then."""
    family, template = FAMILIES[name], load(tmp_path, name)
    sizes: list[int] = []
    render = ChatTemplate.render_adapted

    def count(self: ChatTemplate, messages: Any, **more: Any) -> str:
        sizes.append(len(messages))
        return render(self, messages, **more)

    monkeypatch.setattr(ChatTemplate, "render_adapted", count)
    recording, num_rendered = ConversationRecording(template), list[int]()
    messages: list[Any] = [RULES, QUESTION]
    for number in range(40):
        sizes.clear()
        for _ in range(num_calls):
            called = thinking(template, name, CALLED)
            record(recording, template, messages, family.write_call("look", {"x": 1}), answer=called, tools=TOOLS)
            messages = [*messages, called, {**RESULT, "content": f"wall {number}"}]
        answered = {**ANSWERED, "content": f"Left {number}."}
        turn = record(
            recording, template, messages, family.write_answer(f"Left {number}."), answer=answered, tools=TOOLS
        )
        num_rendered.append(sum(sizes))
        messages = [*messages, answered, AGAIN]
    assert (turn.prompt.path()[num_calls:] == []) == (not CONTINUES[name][1])
    early, late = statistics.median(num_rendered[8:16]), statistics.median(num_rendered[24:])
    assert late <= early, "a few turns check that nothing was missed"
    prompt = recording.chat_prompt(messages, tools=TOOLS)
    if prompt.parent is None:
        assert template.decode_all(prompt.token_ids()) == template.render(messages, tools=TOOLS)
        assert prompt.token_ids() == template.encode(template.render(messages, tools=TOOLS))


NEW_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "jump", "parameters": {}}}]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("Qwen2.5", {"tools": NEW_TOOLS}),
        ("Mistral-Small", {"tools": NEW_TOOLS}),
        ("gpt-oss", {"template_kwargs": {"reasoning_effort": "high"}}),
    ],
)
def test_tools_and_variables_that_change_late_reach_the_prompt(
    tmp_path: Path, name: str, changed: dict[str, Any]
) -> None:
    family, template = FAMILIES[name], load(tmp_path, name)
    recording = ConversationRecording(template)
    messages: list[Any] = [RULES, QUESTION]
    usual: dict[str, Any] = {"tools": TOOLS, "template_kwargs": {"reasoning_effort": "low"}}
    for number in range(11):
        variables = usual | (changed if number >= 7 else {})
        turn = record(recording, template, messages, family.write_call("look", {"x": 1}), answer=CALLED, **variables)
        expected = template.encode(template.render(messages, **variables))
        assert template.decode_all(turn.prompt.token_ids()) == template.decode_all(expected), number
        messages = [*messages, thinking(template, name, CALLED), {**RESULT, "content": f"wall {number}"}]
    assert [turn.number for turn in recording.turns if turn.prompt.parent is None] == [0, 7]


def test_a_template_that_counts_is_rendered_whole(tmp_path: Path) -> None:
    directory = save_family(tmp_path, FAMILIES["Phi-4"])
    counted = FAMILIES["Phi-4"].template.replace("<|im_sep|>' + m['content']", "<|im_sep|>' + loop.index|string")
    (directory / "chat_template.jinja").write_text(counted.replace("|string", "|string + m['content']"))
    template = load_chat_template(directory)
    turns = play_long(template, "Phi-4", tools=None)
    assert "<|im_sep|>48And now?" in template.decode_all(turns[-1].prompt.token_ids())
    assert not any(template.known_excerpts.values())


def test_a_template_that_changes_late_is_noticed(tmp_path: Path) -> None:
    directory = save_family(tmp_path, FAMILIES["Phi-4"])
    late = "{%- if messages|length > 20 %}{{ 'Long. ' }}{% endif %}"
    (directory / "chat_template.jinja").write_text(late + FAMILIES["Phi-4"].template)
    turns = play_long(load_chat_template(directory), "Phi-4", tools=None)
    assert sum(turn.prompt.parent is None for turn in turns) == 2, "one row before, one from the next check on"


@pytest.mark.parametrize(("name", "generated"), [("Qwen2.5", ""), ("Qwen3-2507 thinking", "mm</think>\n\n")])
def test_what_an_episode_stores_grows_with_its_new_tokens(tmp_path: Path, name: str, generated: str) -> None:
    """Old thoughts are left out of each prompt, or none are: either way a turn stores what is new in it."""
    template = load(tmp_path, name)
    recording = ConversationRecording(template)
    messages: list[Any] = []
    stored: list[int] = []
    for number in range(24):
        messages.append({"role": "user", "content": f"{number} {'a word ' * 50}"})
        turn = record(recording, template, list(messages), f"{generated}Left.<|im_end|>", answer=ANSWERED)
        messages.append(ANSWERED)
        if turn.prompt.parent is None:
            assert turn.prompt.token_ids() == template.encode(turn.prompt.rendered)
        stored.append(len(turn.prompt.ids.own) + len(turn.prompt.text.own) + len(turn.prompt.messages.own))
    assert (recording.turns[-1].prompt.parent is None) == (name != "Qwen2.5")
    assert max(stored[2:]) < 1.2 * stored[1]
