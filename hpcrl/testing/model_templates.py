"""Small tokenizers with chat templates of the structure that current model families have; written for tests.

Each template keeps what makes its family difficult: where thoughts are left out, what opens and closes an answer, how
tool calls and results are written, which roles it renders. The texts of the families' instructions are left out.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MERGES = [("Ċ", "Ċ"), ("i", "n"), ("Ġ", "t"), ("e", "r"), ("Ċ", "Ġ")]
"""A few merges, two of which cross the ends of texts that templates write."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A family's template, its marks, and how its model writes an answer."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    """Added tokens that are not special tokens."""
    eos: str
    bos: str | None = None
    stops: tuple[str, ...] = ()
    """The stop tokens of generation_config.json."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    thought: str = ""
    """The text before an answer, with {} for the thought; empty for a model that does not think."""
    text: str = "{}"
    """An answer in text, with {} for the text, up to its stop token."""
    call: str = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    """A tool call, up to its stop token."""
    end: str = ""
    """The stop token that the model generates."""
    end_call: str = ""
    """The one after a tool call, if it is another."""

    def write_answer(self, text: str, *, thought: str = "mm") -> str:
        """Return what the model generates for an answer in text."""
        return (self.thought and self.thought.format(thought)) + self.text.format(text) + self.end

    def write_call(self, name: str, arguments: dict[str, Any], *, thought: str = "mm") -> str:
        """Return what the model generates for a tool call."""
        called = self.call.format(name=name, arguments=json.dumps(arguments), **arguments)
        return (self.thought and self.thought.format(thought)) + called + (self.end_call or self.end)


def save_family(directory: Path, family: ModelFamily) -> Path:
    """Save a family's tokenizer and template as a model directory, without weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, *(a + b for a, b in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in family.special])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in family.plain])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": family.eos, "bos_token": family.bos}))
    (directory / "chat_template.jinja").write_text(family.template)
    if family.stops:
        ids = [tokenizer.token_to_id(mark) for mark in family.stops]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    config = {"model_type": "qwen2", "max_position_embeddings": 4096, "vocab_size": tokenizer.get_vocab_size()}
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}))
    return directory


# ---- ChatML: Qwen

_QWEN_TOOLS = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content + '\n\n' if messages[0].role == 'system' else '' }}# Tools
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""
_QWEN_LAST_QUERY = """\
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for m in messages[::-1] %}
{%- if ns.searching and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.searching = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
{%- endif %}{%- endfor %}"""
_QWEN_TOOL_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""
_QWEN_CALLS = """\
{%- for call in m.tool_calls or [] %}
{{- '\n' if content or not loop.first else '' }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"""
_QWEN35_CALLS = """\
{%- for call in m.tool_calls or [] %}
{{- ('\n\n' if content else '') if loop.first else '\n' }}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\n' + value|string + '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"""
_QWEN_SPLIT = """\
{%- set content = m.content or '' %}{% set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"""


def _qwen(assistant: str, *, opening: str, before: str = "", others: str = "", calls: str = _QWEN_CALLS) -> str:
    return (
        _QWEN_TOOLS
        + before
        + "{%- for m in messages %}"
        + "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        + (others or "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}")
        + "{%- elif m.role == 'assistant' %}"
        + assistant
        + calls
        + "{%- elif m.role == 'tool' %}"
        + _QWEN_TOOL_RESULT
        + "{%- endif %}{%- endfor %}"
        + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        + opening
        + "{%- endif %}"
    )


_QWEN_PLAIN = "{%- set content = m.content or '' %}{{ '<|im_start|>assistant\n' + content }}"
_QWEN3_ASSISTANT = (
    _QWEN_SPLIT
    + """\
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content }}
{%- else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}"""
)
_QWEN35_ASSISTANT = (
    _QWEN_SPLIT
    + """\
{%- if loop.index0 > ns.last %}{{ '<|im_start|>assistant\n<think>\n' + thought|trim + '\n</think>\n\n' + content|trim }}
{%- else %}{{ '<|im_start|>assistant\n' + content|trim }}{% endif %}"""
)
_NO_THINK = "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
_QWEN35_OTHERS = """\
{%- if m.role == 'system' %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{{- '<|im_start|>user\n' + m.content|trim + '<|im_end|>\n' }}"""
_QWEN35_OPENING = (
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}"
)
_QWEN35_NO_QUERY = "{%- if ns.searching %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
_CHATML: dict[str, Any] = {
    "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "eos": "<|im_end|>",
    "stops": ("<|im_end|>", "<|endoftext|>"),
    "end": "<|im_end|>",
}
_THOUGHT, _THOUGHT_REST = "<think>\n{}\n</think>\n\n", "{}\n</think>\n\n"
_QWEN3 = _qwen(_QWEN3_ASSISTANT, opening=_NO_THINK, before=_QWEN_LAST_QUERY)
_QWEN35 = _qwen(
    _QWEN35_ASSISTANT,
    opening=_QWEN35_OPENING,
    before=_QWEN_LAST_QUERY + _QWEN35_NO_QUERY,
    others=_QWEN35_OTHERS,
    calls=_QWEN35_CALLS,
)
_QWEN35_CALL = "<tool_call>\n<function={name}>\n<parameter=x>\n{x}\n</parameter>\n</function>\n</tool_call>"

# ---- others

_LLAMA = """\
{{- bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set first = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{%- else %}{% set first = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + first + '<|eot_id|>' }}
{%- if tools is not none %}
{%- set question = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\n\n' + tools|tojson + '\n\n' + question + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls|length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments|tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' or m.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content|tojson + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content']|trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

_MISTRAL = """\
{%- set today = strftime_now('%Y-%m-%d') %}{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set rules = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set rules = 'Today is ' + today %}{% set turns = messages %}{% endif %}
{{- '[SYSTEM_PROMPT]' + rules + '[/SYSTEM_PROMPT]' }}
{%- set ns = namespace(index=0) %}
{%- for m in turns %}{% if m.role in ('user', 'assistant') and not m.get('tool_calls') %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS]' + tools|tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id|length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric with length 9!') }}{% endif %}
{{- (call.function|tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id|length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric with length 9!') }}
{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}
{%- endfor %}"""

_GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set rules = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}
{%- else %}{% set rules = '' %}{% set turns = messages %}{% endif %}
{%- for m in turns %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + (rules if loop.first else '') }}
{{- m['content']|trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_GEMMA_2 = (
    "{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + _GEMMA
)

_COHERE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set rules = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set rules = false %}{% set turns = messages %}{% endif %}
{%- if rules %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + rules + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for m in turns %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m['content'].strip() }}
{%- elif m['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + m['content'].strip() }}{% endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

_COHERE_2 = """\
{{- bos_token }}{% set ns = namespace(rules=false, asks=true) %}
{%- for m in messages %}{% if m['role']|lower == 'system' %}{% set ns.rules = m['content'] %}{% break %}{% endif %}
{%- endfor %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Preamble' + ('\n' + ns.rules if ns.rules else '') }}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- for m in messages %}{% set role = m['role']|lower %}
{%- if role == 'system' and m['content'] == ns.rules %}{% continue %}{% endif %}
{%- if role in ('user', 'assistant') %}
{%- if (role == 'user') != ns.asks %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.asks = role != 'user' %}{% endif %}
{{- '<|START_OF_TURN_TOKEN|>' }}
{%- if role == 'user' %}{{ '<|USER_TOKEN|>' + m['content'] }}
{%- elif role == 'assistant' %}{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + m['content'] + '<|END_RESPONSE|>' }}
{%- elif role == 'system' %}{{ '<|SYSTEM_TOKEN|>' + m['content'] }}{% endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"""


def _with_bars(text: str) -> str:
    """Return the text with DeepSeek's marks: their bars and spaces are other characters."""
    return re.sub(r"<\|(\w+)\|>", lambda mark: f"<\uff5c{mark[1]}\uff5c>".replace("_", "\u2581"), text)


_DEEPSEEK = _with_bars("""\
{%- set ns = namespace(rules='', is_tool=false, is_output_first=true) %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.rules = ns.rules + m.content %}{% endif %}{% endfor %}
{{- bos_token + ns.rules }}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.is_tool = false %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}{% set ns.is_tool = false %}{{ '<|Assistant|>' + (m.content or '') }}
{{- '<|tool_calls_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>function<|tool_sep|>' + call['function']['name'] }}
{{- '\n```json\n' + call['function']['arguments'] + '\n```<|tool_call_end|>' }}
{%- endfor %}{{ '<|tool_calls_end|><|end_of_sentence|>' }}
{%- elif m.role == 'assistant' %}
{%- if ns.is_tool %}{{ '<|tool_outputs_end|>' + m.content + '<|end_of_sentence|>' }}{% set ns.is_tool = false %}
{%- else %}{% set content = m.content.split('</think>')[-1] if drops_thoughts else m.content %}
{{- '<|Assistant|>' + content + '<|end_of_sentence|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{{- '' if ns.is_tool else '<|tool_outputs_begin|>' }}{% set ns.is_tool = true %}
{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}{% endif %}
{%- endfor %}
{%- if ns.is_tool %}{{ '<|tool_outputs_end|>' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' + opening }}{% endif %}""")

_GLM = """\
[gMASK]<sop>{% if tools %}<|system|>
{{ tools|tojson }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}
{%- set content = m.content or '' %}{% set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1] %}{% endif %}
{{- '\n<think>' + (thought.strip() if loop.index0 > ns.last else '') + '</think>' }}
{%- if content.strip() %}{{ '\n' + content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}
{{- '\n<arg_key>' + name + '</arg_key>\n<arg_value>' + value|string + '</arg_value>' }}{% endfor %}
{{- '\n</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}
{{- '<|observation|>' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"""

_GPT_OSS = """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') }}
{{- '\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role in ('developer', 'system') %}{% set rules = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set rules = '' %}{% set turns = messages %}{% endif %}
{%- if rules or tools %}
{{- '<|start|>developer<|message|>' + rules }}
{%- for tool in tools or [] %}
{{- '// ' + tool.function.description + '\n' + tool|tojson }}
{%- endfor %}{{ '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in turns %}
{%- if m.role == 'assistant' %}
{%- if m.content and '<|channel|>' in m.content %}{{ raise_exception('a message contains <|channel|> tags') }}
{%- endif %}
{%- if m.tool_calls %}
{%- set later = namespace(final=false) %}
{%- for n in turns[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}
{%- set later.final = true %}{% endif %}{% endfor %}
{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- if (m.content or m.thinking) and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}
{%- set last.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments|tojson + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- set last.name = none %}{% endif %}
{%- elif m.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('Message has tool role, but no tool call came before it') }}{% endif %}
{{- '<|start|>functions.' + last.name + '<|channel|>commentary<|message|>' + m.content|tojson + '<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

_PHI = """\
{%- for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant<|im_sep|>' }}
{%- generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

_DEEPSEEK_MARKS: dict[str, Any] = {
    "special": tuple(
        _with_bars(f"<|{name}|>")
        for name in (
            *("begin_of_sentence", "end_of_sentence", "User", "Assistant"),
            *("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end", "tool_sep"),
            *("tool_outputs_begin", "tool_outputs_end", "tool_output_begin", "tool_output_end"),
        )
    ),
    "bos": _with_bars("<|begin_of_sentence|>"),
    "eos": _with_bars("<|end_of_sentence|>"),
    "end": _with_bars("<|end_of_sentence|>"),
    "call": _with_bars(
        "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>{name}\n```json\n{arguments}\n```<|tool_call_end|>"
        "<|tool_calls_end|>"
    ),
}
_GEMMA_MARKS: dict[str, Any] = {
    "special": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "plain": (),
    "bos": "<bos>",
    "eos": "<eos>",
    "stops": ("<eos>", "<end_of_turn>"),
    "call": "```tool_code\n{name}(x={x})\n```",
    "end": "<end_of_turn>",
}
_COHERE_MARKS: dict[str, Any] = {
    "special": tuple(
        f"<{name}>"
        for name in (
            *("BOS_TOKEN", "|START_OF_TURN_TOKEN|", "|END_OF_TURN_TOKEN|", "|USER_TOKEN|", "|CHATBOT_TOKEN|"),
            *("|SYSTEM_TOKEN|", "|START_RESPONSE|", "|END_RESPONSE|"),
        )
    ),
    "plain": (),
    "bos": "<BOS_TOKEN>",
    "eos": "<|END_OF_TURN_TOKEN|>",
}
_LLAMA_MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_MISTRAL_MARKS = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_GPT_OSS_MARKS = ("<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")

FAMILIES: dict[str, ModelFamily] = {
    "Qwen2.5": ModelFamily(template=_qwen(_QWEN_PLAIN, opening=""), **_CHATML),
    "Qwen3": ModelFamily(template=_QWEN3, thought=_THOUGHT, **_CHATML),
    "Qwen3, no thinking": ModelFamily(template=_QWEN3, kwargs={"enable_thinking": False}, **_CHATML),
    "Qwen3-2507 instruct": ModelFamily(template=_qwen(_QWEN_PLAIN, opening=""), **_CHATML),
    "Qwen3-2507 thinking": ModelFamily(
        template=_qwen(_QWEN3_ASSISTANT, opening="{{ '<think>\n' }}", before=_QWEN_LAST_QUERY),
        thought=_THOUGHT_REST,
        **_CHATML,
    ),
    "Qwen3.5": ModelFamily(template=_QWEN35, thought=_THOUGHT_REST, call=_QWEN35_CALL, **_CHATML),
    "Qwen3.5, no thinking": ModelFamily(
        template=_QWEN35, kwargs={"enable_thinking": False}, call=_QWEN35_CALL, **_CHATML
    ),
    "Llama-3.1, 3.3": ModelFamily(
        template=_LLAMA,
        special=(*_LLAMA_MARKS, "<|eom_id|>", "<|eot_id|>"),
        plain=(),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        call='{{"name": "{name}", "parameters": {arguments}}}',
        end="<|eot_id|>",
    ),
    "Mistral-Small": ModelFamily(
        template=_MISTRAL,
        special=(*_MISTRAL_MARKS, "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        plain=(),
        bos="<s>",
        eos="</s>",
        call='[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}, "id": "abcdef012"}}]',
        end="</s>",
    ),
    "Gemma-2": ModelFamily(template=_GEMMA_2, **_GEMMA_MARKS),
    "Gemma-3": ModelFamily(template=_GEMMA, **_GEMMA_MARKS),
    "Aya Expanse": ModelFamily(template=_COHERE, end="<|END_OF_TURN_TOKEN|>", **_COHERE_MARKS),
    "Tiny Aya": ModelFamily(template=_COHERE_2, end="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", **_COHERE_MARKS),
    "DeepSeek-V3": ModelFamily(
        template="{%- set opening = '' %}{% set drops_thoughts = false %}" + _DEEPSEEK, **_DEEPSEEK_MARKS
    ),
    "DeepSeek-R1": ModelFamily(
        template="{%- set opening = '<think>\n' %}{% set drops_thoughts = true %}" + _DEEPSEEK,
        thought=_THOUGHT_REST,
        **_DEEPSEEK_MARKS,
    ),
    "GLM-4.5": ModelFamily(
        template=_GLM,
        special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        eos="<|endoftext|>",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        thought="\n<think>{}</think>\n",
        call="<tool_call>{name}\n<arg_key>x</arg_key>\n<arg_value>{x}</arg_value>\n</tool_call>",
        end="<|user|>",
        end_call="<|observation|>",
    ),
    "gpt-oss": ModelFamily(
        template=_GPT_OSS,
        special=(*_GPT_OSS_MARKS, "<|constrain|>"),
        plain=(),
        eos="<|return|>",
        stops=("<|return|>", "<|endoftext|>", "<|call|>"),
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        text="<|channel|>final<|message|>{}",
        call=" to=functions.{name}<|channel|>commentary json<|message|>{arguments}",
        end="<|return|>",
        end_call="<|call|>",
    ),
    "Phi-4": ModelFamily(
        template=_PHI,
        special=("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        plain=(),
        eos="<|im_end|>",
        stops=("<|endoftext|>", "<|im_end|>"),
        end="<|im_end|>",
    ),
}
