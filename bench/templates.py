"""Measure how many generated tokens are trained, by chat template and kind of agent: `python -m bench.templates`.

    chat         a user asks eight questions, one after the other
    tool loop    one question, eight tool calls, an answer
    sub-agent    three tool calls, each of which a second conversation of two turns answers
    compaction   a tool loop of nine calls, whose history a summary replaces twice

Each agent calls the recording that the proxy uses, with small tokenizers whose templates have the structure of current
families (`hpcrl/testing/model_templates.py`); an answer is written as the family writes it, with thoughts if its model
thinks, and the client sends it back as OpenAI clients do, without thoughts. A cell is the share of generated tokens
that is in the loss of the record, exactly once, and the number of rows. `--markdown` prints the table of
docs/templates.md.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.figures import Figure, main
from hpcrl.config.recipe import ModelConfig
from hpcrl.engines.base import Completion
from hpcrl.envs.base import ConversationChoice
from hpcrl.errors import ConfigError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents.episode_record import EpisodeFacts, build_record
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.testing.model_templates import FAMILIES, ModelFamily, save_family

FACTS = EpisodeFacts(
    id="bench/0/0",
    group="bench/0",
    domain="bench",
    seed=0,
    status="done",
    producer="bench",
    start_version=0,
    started_at=0.0,
    ended_at=1.0,
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
RULES = {"role": "system", "content": "You explore a house. " * 5}
Message = dict[str, Any]


class TrainedShare(NamedTuple):
    """What is trained of an episode."""

    share: float
    num_rows: int
    refusal: str = ""


class ModelClient:
    """An agent's connection to a model that writes what it is asked to; its directory has been saved."""

    def __init__(self, family: ModelFamily, directory: Path, kwargs: Mapping[str, Any] | None = None) -> None:
        self._family = family
        config = ModelConfig(chat_template_kwargs=dict(family.kwargs if kwargs is None else kwargs))
        self._template = load_chat_template(directory, config)
        self.recording = ConversationRecording(self._template)
        self.num_generated = 0
        self.conversations: list[tuple[list[Message], Any]] = []
        """The messages after each turn and its tools, with the thoughts that the client does not send back."""
        self._thoughts: dict[str, str] = {}
        self.has_tools = self._template.form.has_tools

    def answer(self, messages: list[Message], text: str, *, tools: Any = None) -> list[Message]:
        """Let the model answer in text; return the conversation with the answer."""
        thought = f"I think of {len(messages)}."
        written = self._family.write_answer(text, thought=thought)
        return self._record(messages, written, {"role": "assistant", "content": text}, thought=thought, tools=tools)

    def call(self, messages: list[Message], number: int) -> list[Message]:
        """Let the model call a tool."""
        name, arguments = "look", {"x": number}
        function = {"name": name, "arguments": arguments}
        calls = [{"id": f"call{number:05}", "type": "function", "function": function}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        thought = f"Where is {number}?"
        written = self._family.write_call(name, arguments, thought=thought)
        return self._record(messages, written, answer, thought=thought, tools=TOOLS)

    def _record(
        self, messages: list[Message], written: str, answer: Message, *, thought: str, tools: Any
    ) -> list[Message]:
        prompt = self.recording.chat_prompt(messages, tools=tools)
        ids = self._template.encode(written)
        num = len(ids)
        completion = Completion(token_ids=ids, logprobs=[-1.0] * num, versions=[0] * num, finish_reason="stop")
        self.recording.record_answer(prompt, completion, answer=answer, is_trained=True, started_at=0.0, generate_s=0.0)
        self.num_generated += num
        self._thoughts[str(answer)] = thought if self._family.thought else ""
        self.conversations.append(([self._with_thought(one) for one in [*messages, answer]], tools))
        return [*messages, answer]

    def _with_thought(self, message: Message) -> Message:
        thought = self._thoughts.get(str(message))
        return {**message, "reasoning_content": thought} if thought else message


def ask(text: str) -> Message:
    return {"role": "user", "content": text}


def make_result(number: int, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05}"}


def chat(model: ModelClient) -> None:
    messages = [RULES]
    for number in range(8):
        messages = model.answer([*messages, ask(f"Question {number}?")], f"Answer {number}.")


def loop_over_tools(model: ModelClient) -> None:
    messages = [RULES, ask("Find the key.")]
    for number in range(8):
        messages = [*model.call(messages, number), make_result(number, f"Room {number} is empty.")]
    model.answer(messages, "There is none.", tools=TOOLS)


def ask_sub_agents(model: ModelClient) -> None:
    messages = [RULES, ask("Find the key.")]
    for number in range(3):
        messages = model.call(messages, number)
        inner = model.answer([ask(f"Describe room {number}.")], f"Room {number} is red.")
        inner = model.answer([*inner, ask("Shorter.")], "Red.")
        messages = [*messages, make_result(number, inner[-1]["content"])]
    model.answer(messages, "All are red.", tools=TOOLS)


def compact_history(model: ModelClient) -> None:
    messages = [RULES, ask("Find the key.")]
    for number in range(9):
        messages = [*model.call(messages, number), make_result(number, f"Room {number} is empty.")]
        if number % 4 == 3:
            summary = model.answer([ask(f"Summarise: {messages[-1]['content']}")], f"Rooms to {number} are empty.")
            messages = [RULES, ask(f"Find the key. {summary[-1]['content']}")]
    model.answer(messages, "There is none.", tools=TOOLS)


AGENTS: dict[str, Callable[[ModelClient], None]] = {
    "chat": chat,
    "tool loop": loop_over_tools,
    "sub-agent": ask_sub_agents,
    "compaction": compact_history,
}


def make_model(family: ModelFamily) -> ModelClient:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as directory:
        return ModelClient(family, save_family(Path(directory), family))


def measure_share(
    family: ModelFamily, agent: Callable[[ModelClient], None], *, choice: ConversationChoice
) -> TrainedShare:
    """Let an agent play with a model of the family; return what is trained."""
    return play_agent(make_model(family), agent, choice=choice)


def play_agent(model: ModelClient, agent: Callable[[ModelClient], None], *, choice: ConversationChoice) -> TrainedShare:
    """Let an agent play with a model; return what is trained."""
    try:
        agent(model)
    except ConfigError as error:
        return TrainedShare(0.0, 0, str(error).rpartition(": ")[2])
    record = build_record(model.recording.turns, FACTS, reward=1.0, choice=choice)
    covered = np.concatenate([np.arange(turn.start, turn.end) for turn in record.turns])
    assert len(np.unique(covered)) == len(covered) == model.num_generated, "each generated token has one place"
    return TrainedShare(int(record.loss_mask.sum()) / model.num_generated, max(1, len(record.rows)))


def measure(full: bool) -> list[Figure]:
    """Return the least share of each family over the agents that its template accepts."""
    figures = []
    for name, family in FAMILIES.items():
        shares = [measure_share(family, agent, choice="all") for agent in AGENTS.values()]
        played = [cell.share for cell in shares if not cell.refusal]
        figures.append(Figure(name=f"{name}: tokens trained, {len(played)} agents", value=min(played), bar=1.0))
    return figures


def make_table() -> list[str]:
    """Return the lines of the table, in Markdown."""
    lines = [f"| template | {' | '.join(AGENTS)} |", f"|---|{'---|' * len(AGENTS)}"]
    refusals: dict[str, int] = {}
    for name, family in FAMILIES.items():
        cells = []
        for agent in AGENTS.values():
            cell, longest = (measure_share(family, agent, choice=choice) for choice in ("all", "longest"))
            note = refusals.setdefault(cell.refusal, len(refusals) + 1) if cell.refusal else 0
            rows = f"{cell.num_rows} row{'s' * (cell.num_rows > 1)}"
            cells.append(f"refused ({note})" if note else f"{cell.share:.0%}, {rows} ({longest.share:.0%})")
        mark = "" if make_model(family).has_tools else " [t]"
        lines.append(f"| {name}{mark} | {' | '.join(cells)} |")
    return [
        *lines,
        "\n[t] The template leaves tools out: they are described in the system message.",
        *(f"\n({number}) The template refuses this conversation: {why}" for why, number in refusals.items()),
    ]


if __name__ == "__main__":
    if "--markdown" in sys.argv:
        sys.stdout.write("\n".join(make_table()) + "\n")
    else:
        sys.exit(main("templates", measure))
