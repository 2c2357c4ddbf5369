"""Templates with the structure of current families: layouts, what they accept of messages, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config.recipe import ModelConfig
from hpcrl.errors import ConfigError, TemplateLimitError
from hpcrl.models.call_form import PLAIN_CALL
from hpcrl.models.chat_layout import load_chat_layout, load_chat_template
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.testing.model_templates import FAMILIES, ModelFamily, save_family

ALTERNATING = ("Mistral-Small", "Gemma-2", "Gemma-3", "Aya Expanse", "Tiny Aya")
WITHOUT_RESULTS = ALTERNATING[1:]
LEAVE_TOOLS_OUT = {*WITHOUT_RESULTS, "DeepSeek-V3", "DeepSeek-R1", "Phi-4"}
USER, RULES = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind."}
LAYOUTS = {
    "Qwen2.5": "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n",
    "Qwen3": "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n<think>\nmm\n</think>\n\nyes<|im_end|>\n"
    "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n",
    "Qwen3, no thinking": "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    "yes<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "Qwen3-2507 thinking": "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n<think>\nmm\n</think>\n\n"
    "yes<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "Mistral-Small": "<s>[SYSTEM_PROMPT]Today is DATE[/SYSTEM_PROMPT][INST]U1[/INST]yes</s>[INST]U2[/INST]",
    "Gemma-3": "<bos><start_of_turn>user\nU1<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
    "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\n",
    "DeepSeek-R1": "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>U1<\uff5cAssistant\uff5c>"
    "<think>\nmm\n</think>\n\nyes<\uff5cend\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>U2<\uff5cAssistant\uff5c><think>\n",
    "GLM-4.5": "[gMASK]<sop><|user|>\nU1<|assistant|>\n<think>mm</think>\nyes<|user|>\nU2<|assistant|>",
    "gpt-oss": "<|start|>system<|message|>Current date: DATE\nReasoning: medium<|end|><|start|>user<|message|>U1<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>mm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    "<|start|>user<|message|>U2<|end|><|start|>assistant",
    "Phi-4": "<|im_start|>user<|im_sep|>U1<|im_end|><|im_start|>assistant<|im_sep|>yes<|im_end|>"
    "<|im_start|>user<|im_sep|>U2<|im_end|><|im_start|>assistant<|im_sep|>",
}
LAYOUTS["Gemma-2"] = LAYOUTS["Gemma-3"]
LAYOUTS["Aya Expanse"] = (
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>U1<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "yes<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>U2<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|CHATBOT_TOKEN|>"
)
LAYOUTS["Tiny Aya"] = (
    LAYOUTS["Aya Expanse"]
    .replace("<|CHATBOT_TOKEN|>", "<|CHATBOT_TOKEN|><|START_RESPONSE|>")
    .replace("yes", "yes<|END_RESPONSE|>")
    .replace("<BOS_TOKEN>", "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Preamble<|END_OF_TURN_TOKEN|>")
)
LAYOUTS["Qwen3-2507 instruct"], LAYOUTS["Qwen3.5"] = LAYOUTS["Qwen2.5"], LAYOUTS["Qwen3-2507 thinking"]
LAYOUTS["Qwen3.5, no thinking"] = LAYOUTS["Qwen3, no thinking"]
LAYOUTS["DeepSeek-V3"] = LAYOUTS["DeepSeek-R1"].replace("<think>\nmm\n</think>\n\n", "").replace("<think>\n", "")
LAYOUTS["Llama-3.1, 3.3"] = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: DAY\n\n<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU1<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "yes<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU2<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.fixture(autouse=True)
def one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    days = {"%Y-%m-%d": "DATE", "%d %b %Y": "DAY"}
    monkeypatch.setattr("hpcrl.models.jinja_template._format_now", days.__getitem__)


def config_of(family: ModelFamily, **more: Any) -> ModelConfig:
    return ModelConfig(chat_template_kwargs=dict(family.kwargs), **more)


def load(tmp_path: Path, name: str, **more: Any) -> ChatTemplate:
    return load_chat_template(save_family(tmp_path / "m", FAMILIES[name]), config_of(FAMILIES[name], **more))


def save_template(tmp_path: Path, template: str) -> Path:
    """Save Qwen's tokenizer with another template."""
    directory = save_family(tmp_path / "m", FAMILIES["Qwen2.5"])
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layout_of_a_family_keeps_every_generated_token(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    layout = load_chat_layout(save_family(tmp_path, family), config_of(family))
    generated = layout.template.encode(family.write_answer("yes"))
    ids = [*layout.first_turn("U1"), *generated, *layout.next_turn("U2", generated=generated)]
    assert layout.template.decode_all(ids) == LAYOUTS[name]
    first = layout.first_turn("U1")
    assert ids[len(first) : len(first) + len(generated)] == generated


@pytest.mark.parametrize("name", FAMILIES)
def test_a_first_turn_has_the_ids_of_the_whole_rendering(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    layout = load_chat_layout(save_family(tmp_path, family), config_of(family))
    assert layout.first_turn("What now?") == layout.template.encode(
        layout.template.render([{"role": "user", "content": "What now?"}])
    )


def test_all_stops_of_the_generation_config_stop(tmp_path: Path) -> None:
    template = load(tmp_path, "Llama-3.1, 3.3")
    assert [template.decode_token(token) for token in template.stop_token_ids] == [
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
    ]


def test_the_end_of_an_analysis_is_not_a_stop_of_gpt_oss(tmp_path: Path) -> None:
    template = load(tmp_path, "gpt-oss")
    stops = {template.decode_token(token) for token in template.stop_token_ids}
    assert stops == {"<|return|>", "<|call|>", "<|endoftext|>"}


def test_one_stop_that_is_not_a_list_is_read(tmp_path: Path) -> None:
    directory = save_family(tmp_path, FAMILIES["Qwen2.5"])
    (directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert 7 in load_chat_template(directory).stop_token_ids


@pytest.mark.parametrize("stops", ['"x"', '["x"]', "[-1]", "[1.5]"])
def test_stops_that_are_not_ids_are_refused(tmp_path: Path, stops: str) -> None:
    directory = save_family(tmp_path, FAMILIES["Qwen2.5"])
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": {stops}}}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        load_chat_template(directory)


def test_a_template_whose_close_is_plain_text_works(tmp_path: Path) -> None:
    directory = save_template(
        tmp_path,
        "{% for m in messages %}{{ 'Bot: ' if m.role == 'assistant' else 'You: ' }}{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}Bot: {% endif %}",
    )
    layout = load_chat_layout(directory)
    generated = layout.template.encode("yes")
    ids = [*layout.first_turn("U1"), *generated, *layout.next_turn("U2", generated=generated)]
    assert layout.template.decode_all(ids) == "You: U1\n\nBot: yes\n\nYou: U2\n\nBot: "
    assert layout.close_id is None


@pytest.mark.parametrize("place", ["file", "text", "list", "dict", "additional"])
def test_a_template_is_found_wherever_transformers_saves_it(tmp_path: Path, place: str) -> None:
    directory = save_family(tmp_path, FAMILIES["Phi-4"])
    expected = load_chat_template(directory).render([USER])
    text = FAMILIES["Phi-4"].template
    if place != "file":
        (directory / "chat_template.jinja").unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": text}]
    stored = {"text": text, "list": named, "dict": {"rag": "no", "default": text}}
    if place in stored:
        (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": stored[place]}))
    if place == "additional":
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "default.jinja").write_text(text)
    assert load_chat_template(directory).render([USER]) == expected


TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"x": 1}}}]
CALL = {"id": "abcdef012", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}


def save_two_templates(directory: Path, *, tool_use: str, place: str) -> Path:
    """Save Phi-4, whose template leaves tools out, with another template for conversations with tools."""
    family = replace(FAMILIES["Qwen2.5"], template=FAMILIES["Phi-4"].template.replace("<|im_sep|>", "\n"))
    save_family(directory, family)
    if place == "files":
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
        return directory
    (directory / "chat_template.jinja").unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": family.template}, {"name": "tool_use", "template": tool_use}]
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    return directory


@pytest.mark.parametrize("place", ["files", "settings"])
def test_conversations_with_tools_have_the_template_that_the_model_has_for_them(tmp_path: Path, place: str) -> None:
    tool_use = FAMILIES["Qwen2.5"].template
    template = load_chat_template(save_two_templates(tmp_path / "two", tool_use=tool_use, place=place))
    one = load_chat_template(save_family(tmp_path / "one", FAMILIES["Qwen2.5"]))
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [RULES, USER, called, {"role": "tool", "content": "a wall", "tool_call_id": CALL["id"]}]
    assert template.render(messages, tools=TOOLS) == one.render(messages, tools=TOOLS)
    assert "You can call" not in template.render(messages, tools=TOOLS)
    assert not template.choose_form(None).has_tools
    assert template.choose_form(TOOLS).has_tools
    assert template.render([USER]).endswith("Hi<|im_end|><|im_start|>assistant\n"), "without tools it is the default"


def test_a_template_for_tools_that_leaves_messages_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tool_use'.*leaves a message out"):
        load_chat_template(save_two_templates(tmp_path, tool_use="no", place="settings"))


def test_the_recipe_replaces_template_variables_and_system_message(tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(FAMILIES["Qwen3"].template)
    config = ModelConfig(chat_template=str(other), chat_template_kwargs={"enable_thinking": False}, system="Be brief.")
    layout = load_chat_layout(save_family(tmp_path / "m", FAMILIES["Qwen2.5"]), config)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert layout.template.render([USER]) == expected + "<think>\n\n</think>\n\n"
    assert layout.template.decode_all(layout.first_turn("Hi")) == expected + "<think>\n\n</think>\n\n"
    assert layout.template.render([USER], template_kwargs={"enable_thinking": True}) == expected
    assert "Be brief." not in layout.template.render([RULES, USER])
    assert "Be brief." not in layout.template.render([{**RULES, "role": "developer"}, USER])


def test_a_template_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template = .*none\.jinja"):
        load_chat_template(save_family(tmp_path, FAMILIES["Phi-4"]), ModelConfig(chat_template="/none.jinja"))


# ---- what a template accepts


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Rule one."}, USER],
        [RULES, {"role": "developer", "content": "Rule one."}, USER],
        [{"role": "developer", "content": "Rule one."}, RULES, USER],
        [RULES, USER, {"role": "assistant", "content": "Hm."}, {"role": "developer", "content": "Rule one."}, USER],
    ],
)
def test_instructions_reach_every_model(tmp_path: Path, name: str, messages: list[Any]) -> None:
    rendered = load(tmp_path, name).render(messages)
    assert "Rule one." in rendered
    assert ("Be kind." in rendered) == (RULES in messages)


def test_instructions_are_part_of_the_question_without_a_system_role(tmp_path: Path) -> None:
    text = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = load_chat_template(save_template(tmp_path, text + FAMILIES["Gemma-3"].template))
    assert template.render([RULES, USER]).startswith("<start_of_turn>user\nBe kind.\n\nHi")


@pytest.mark.parametrize("name", FAMILIES)
def test_tool_calls_and_results_reach_every_model(tmp_path: Path, name: str) -> None:
    call = {"id": "call_0123456789abcdef_0", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a wall", "tool_call_id": call["id"]},
    ]
    rendered = load(tmp_path, name).render(messages, tools=[{"type": "function", "function": {"name": "look"}}])
    assert rendered.count("look") >= 2
    assert "a wall" in rendered


def make_calls(*names: str) -> list[dict[str, Any]]:
    """Make tool calls with ids of these names."""
    return [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": {"x": 1}}} for name in names
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_with_several_calls_is_rendered_with_each_result(tmp_path: Path, name: str) -> None:
    """Llama-3.1 refuses more than one call in an answer, gpt-oss leaves it out: each is followed by its own result."""
    template = load(tmp_path, name)
    results = [
        {"role": "tool", "content": f"seen {name}", "tool_call_id": f"call_{name}"} for name in ("listen", "look")
    ]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": make_calls("look", "listen")}, *results]
    rendered = template.render(messages)
    for text in ("seen look", "seen listen"):
        assert rendered.count(text) == 1
    assert template.form.has_single_calls == (name in ("Llama-3.1, 3.3", "gpt-oss"))
    if template.form.has_single_calls:
        written = "to=functions.{}<" if name == "gpt-oss" else '"name": "{}"'
        calls = [written.format(call) for call in ("look", "listen")]
        places = [rendered.index(text) for text in (calls[0], "seen look", calls[1], "seen listen")]
        assert places == sorted(places)


@pytest.mark.parametrize("num_results", [0, 1, 3])
def test_calls_with_fewer_or_more_results_stay_in_order(tmp_path: Path, num_results: int) -> None:
    template = load(tmp_path, "Llama-3.1, 3.3")
    results = [{"role": "tool", "content": f"seen {number}"} for number in range(num_results)]
    answer = {"role": "assistant", "content": "", "tool_calls": make_calls("look", "listen")}
    rendered = template.render([USER, answer, *results, {**USER, "content": "And?"}])
    texts = [
        "look",
        *(["seen 0"] if num_results else []),
        "listen",
        *(f"seen {n}" for n in range(1, num_results)),
        "And?",
    ]
    places = [rendered.index(text) for text in texts]
    assert places == sorted(places)


ANSWER = {"role": "assistant", "content": "Yes."}
RESULT = {"role": "tool", "content": "a wall", "tool_call_id": "call_look"}
ODD_ORDERS = {
    "two questions": [USER, {**USER, "content": "Go on."}],
    "a question after a result": [
        USER,
        {**ANSWER, "tool_calls": make_calls("look")},
        RESULT,
        {**USER, "content": "So?"},
    ],
    "two answers": [USER, ANSWER, {**ANSWER, "content": "Or no."}, {**USER, "content": "What?"}],
    "an answer first": [ANSWER, USER],
    "an answer first, after rules": [RULES, ANSWER, USER],
    "rules only": [RULES],
    "rules between questions": [USER, RULES, {**USER, "content": "Go on."}],
    "results only": [RESULT, {**RESULT, "content": "a cat"}],
}


@pytest.mark.parametrize("order", ODD_ORDERS)
@pytest.mark.parametrize("name", ALTERNATING)
def test_messages_in_any_order_reach_a_model_whose_template_wants_turns(tmp_path: Path, name: str, order: str) -> None:
    rendered = load(tmp_path, name).render(ODD_ORDERS[order])
    expected = [message["content"] for message in ODD_ORDERS[order]]
    if RULES in ODD_ORDERS[order]:
        expected = ["Be kind.", *(text for text in expected if text != "Be kind.")]
    if name == "Mistral-Small" and order == "a question after a result":
        expected.remove("Yes.")  # its template leaves text beside calls out
    places = [rendered.find(text) for text in expected]
    assert places == sorted(places)
    assert places[0] >= 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_of_roles_and_what_is_written_as_text_is_found_out(tmp_path: Path, name: str) -> None:
    form = load(tmp_path, name).form
    assert form.alternates == (name in ALTERNATING)
    assert form.has_results == (name not in WITHOUT_RESULTS)
    assert form.has_calls == (name not in (*WITHOUT_RESULTS, "Phi-4"))


def test_calls_are_written_by_a_template_that_wants_no_content_beside_them(tmp_path: Path) -> None:
    """The first templates of DeepSeek-R1 have calls only in an answer whose content is none."""
    directory = save_family(tmp_path, FAMILIES["DeepSeek-R1"])
    path = directory / "chat_template.jinja"
    path.write_text(path.read_text().replace("and m.tool_calls %}", "and m.content is none %}"))
    template = load_chat_template(directory)
    assert (template.form.has_calls, template.form.has_null_content) == (True, True)
    messages = [USER, {**ANSWER, "content": "", "tool_calls": make_calls("look")}, RESULT]
    assert "<\uff5ctool\u2581sep\uff5c>look" in template.render(messages)


def test_neighbours_are_joined_into_one_turn(tmp_path: Path) -> None:
    results = [RESULT, {**RESULT, "content": "a cat"}]
    messages = [USER, {**ANSWER, "tool_calls": make_calls("look", "look")}, *results, {**USER, "content": "So?"}]
    rendered = load(tmp_path, "Gemma-3").render(messages)
    assert rendered == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes."
        + '\n<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>' * 2
        + "<end_of_turn>\n<start_of_turn>user\n<tool_response>\na wall\n</tool_response>\n\n<tool_response>\na cat\n"
        "</tool_response>\n\nSo?<end_of_turn>\n<start_of_turn>model\n"
    )


# ---- bad templates

BAD = {
    "{{ raise_exception('never') }}": "never",
    "{{ 1 // 0 }}": "refuses this conversation",
    "{{ messages.nothing.more }}": "refuses this conversation",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "refuses this conversation",
    "{% for i in range(10 ** 9) %}x{% endfor %}": "refuses this conversation",
    "{% for m in messages %}<|im_start|>{% endfor %}": "leaves a message out",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}": "leaves a message out",
    "{% for m in messages %}<|im_start|>{{ m.role + m.content }}<|im_end|>{% endfor %}": "does not open an answer",
    "{% for m in messages %}{{ m.content }}{% endfor %}": "does not open an answer",
    "{{ messages[0].content.__class__.__mro__ }}": "refuses this conversation",
    "{% if %}": "cannot be compiled",
}


@pytest.mark.parametrize("template", BAD)
def test_a_bad_template_is_refused_with_one_line(tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigError, match=BAD[template]) as refused:
        load_chat_template(save_template(tmp_path, template))
    assert "\n" not in str(refused.value)


def test_a_model_without_any_stop_is_refused(tmp_path: Path) -> None:
    family = ModelFamily(template="{% for m in messages %}{{ m.content }}\n{% endfor %}", special=(), eos="")
    with pytest.raises(ConfigError, match="no token ends an answer"):
        load_chat_template(save_family(tmp_path, family))


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("messages", [[USER], [RULES, USER]], ids=["plain", "system"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_model_reads_of_its_tools(tmp_path: Path, name: str, messages: list[dict[str, Any]]) -> None:
    template = load(tmp_path, name)
    assert template.form.has_tools == (name not in LEAVE_TOOLS_OUT)
    rendered = template.render(messages, tools=[TOOL])
    assert rendered.count('"name": "look"') == 1
    assert len(template.encode(rendered)) > len(template.encode(template.render(messages)))
    for message in messages:
        assert message["content"] in rendered


def test_a_described_tool_comes_with_the_form_of_a_call(tmp_path: Path) -> None:
    template = load(tmp_path, "Phi-4")
    template = replace(template, form=msgspec.structs.replace(template.form, call_form=PLAIN_CALL))
    assert PLAIN_CALL.text in template.render([USER], tools=[TOOL])
    assert PLAIN_CALL.text not in template.render([USER])


def test_a_template_that_exhausts_memory_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refuses this conversation: MemoryError"):
        load_chat_template(save_template(tmp_path, "{{ '{:>1000000000000000000}'.format(1) }}"))
    with pytest.raises(TemplateLimitError, match="its chat template renders a conversation to more than 64 Mi char"):
        load_chat_template(save_template(tmp_path, "{{ 'x' * (2 ** 60) }}"))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LEAVE_TOOLS_OUT])
def test_a_tool_without_a_description_is_described_to_the_model(tmp_path: Path, name: str) -> None:
    template = load(tmp_path, name)
    function = {"name": "add_up", "parameters": {"type": "object"}}
    assert "add_up" in template.render([USER], tools=[{"type": "function", "function": function}])
    assert template.form.needs_tool_descriptions == (name == "gpt-oss")
