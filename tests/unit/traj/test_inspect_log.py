"""`hpcrl traj export --format inspect` writes logs that inspect-ai reads, and messages have the template's roles."""

import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hpcrl.models.chat_layout import load_chat_template
from hpcrl.spool.record import ConversationRow, EpisodeTurn
from hpcrl.system.files import publish_json
from hpcrl.testing.model_templates import FAMILIES, save_family
from hpcrl.traj.__main__ import main
from hpcrl.traj.conversation import make_message_splitter
from tests.support.campaign_spools import Spools, unscored
from tests.support.readers import find_readers, run_reader
from tests.support.trajectories import make_lake_trajectory

QWEN = (
    "{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content }}"
    "{%- if tools %}{{ '\n\n# Tools\n' + tools | tojson }}{% endif %}{{ '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- elif not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MARKS = {
    QWEN: ["<|im_start|>", "<|im_end|>"],
    LLAMA: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    STRICT: ["<start_of_turn>", "<end_of_turn>"],
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <|im_end|> and <|eot_id|>.\n\nNow."},
    {"role": "assistant", "content": "It is done."},
    {"role": "tool", "content": "one\ntwo"},
    {"role": "tool", "content": "three"},
]


def make_model_dir(directory: Path, template: str) -> Path:
    """Make a tokenizer of bytes with the marks of a template."""
    marks = MARKS[template]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": marks[-1]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def split(directory, messages):
    template = load_chat_template(directory)
    splitter = make_message_splitter(template)
    return splitter.split_messages(template.encode(template.render(messages)))


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_a_rendered_conversation_is_cut_into_its_messages(tmp_path, template):
    assert split(make_model_dir(tmp_path / "model", template), TALK) == (TALK, "")


def test_a_template_without_some_roles_still_cuts_the_others(tmp_path):
    talk = [message for message in TALK if message["role"] in ("user", "assistant")] + [TALK[1]]
    assert split(make_model_dir(tmp_path / "model", STRICT), talk) == (talk, "")


def test_a_default_system_prompt_and_tools_are_system_messages(tmp_path):
    directory = make_model_dir(tmp_path / "model", QWEN)
    assert split(directory, TALK[1:])[0] == [{"role": "system", "content": "You are helpful."}, *TALK[1:]]
    template = load_chat_template(directory)
    rendered = template.render(TALK, tools=[{"name": "ls"}])
    messages, _ = make_message_splitter(template).split_messages(template.encode(rendered))
    assert messages == [{"role": "system", "content": 'Be brief.\n\n# Tools\n[{"name": "ls"}]'}, *TALK[1:]]


# ---- a record with a tool call, an edited history and a sub-agent

CALL = '<think>\nLook.\n</think>\n\nI look.\n<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is there?"}]
LATER = [*FIRST, {"role": "assistant", "content": CALL}, {"role": "tool", "content": "etc usr"}]
EDITED = [*FIRST, {"role": "user", "content": "Quickly!"}]
SUB = [{"role": "system", "content": "You are a sub-agent."}, {"role": "user", "content": "Count."}]


class RecordBuilder:
    """The columns of a record, grown turn by turn as an agent program would make them."""

    def __init__(self, directory):
        self.template = load_chat_template(directory)
        self.ids, self.mask, self.turns, self.rows = [], [], [], []

    def read(self, text):
        ids = self.template.encode(text)
        self.ids += ids
        self.mask += [False] * len(ids)

    def generate(self, text, **facts):
        ids = [*self.template.encode_text(text), self.template.close_id]
        start = len(self.ids)
        self.ids += ids
        self.mask += [not facts.get("masked")] * len(ids)
        place = {"start": start, "end": len(self.ids), "row": len(self.rows)}
        self.turns.append(EpisodeTurn(**place, generate_s=0.5, step_s=0.25, **facts))

    def end_row(self, **row):
        self.rows.append(ConversationRow(end=len(self.ids), **row))

    def record(self, **facts):
        mask = np.array(self.mask, np.bool_)
        columns = {
            "token_ids": np.array(self.ids, np.int32),
            "logprobs": np.where(mask, -0.5, 0).astype(np.float32),
            "versions": np.where(mask, 3, 0).astype(np.int32),
            "loss_mask": mask,
        }
        return make_lake_trajectory(5, 2, turns=self.turns, rows=self.rows, **columns, **facts)


@pytest.fixture
def forked(tmp_path):
    """Make a campaign with one episode of three conversations and six turns."""
    spools = Spools(tmp_path / "campaign")
    builder = RecordBuilder(make_model_dir(spools.campaign.model, QWEN))
    template = builder.template
    builder.read(first := template.render(FIRST))
    builder.generate(CALL)
    builder.read(template.render(LATER).removeprefix(f"{first}{CALL}<|im_end|>"))
    builder.generate("Two directories.")
    builder.end_row()
    builder.read(template.render(EDITED).removeprefix(shared := template.render(FIRST).removesuffix("assistant\n")))
    builder.generate("Files.", masked="choice", reward=0.5)
    builder.end_row(parent=0, shares=len(template.encode(shared)))
    builder.read(template.render(SUB))
    builder.generate("2")
    builder.end_row()
    spools.scored(builder.record(reward_parts={"goal": 0.25, "format": 0.25}))
    return name_parsers(spools, reasoning_parser="think")  # the template above has no mark of thoughts


def name_parsers(spools, **names):
    """Give the campaign's recipe these parsers."""
    publish_json(spools.campaign.recipe, {"name": "quickstart", "engine": names})
    return spools


def export(spools, *words):
    return main([str(spools.campaign.root), "export", "name", *map(str, words), "--format", "inspect"])


def read_log(directory, task):
    """Return a log's files by name."""
    (path,) = directory.glob(f"*_{task}_*.eval")
    with zipfile.ZipFile(path) as log:
        return {name: json.loads(log.read(name)) for name in log.namelist()}


def expand_input(sample, event):
    pool = sample["events_data"]["messages"]
    return [pool[index]["content"] for start, end in event["input_refs"] for index in range(start, end)]


def test_a_sample_has_the_messages_tool_calls_and_thoughts_of_its_main_conversation(forked, tmp_path):
    assert export(forked, tmp_path / "logs") == 0
    sample = read_log(tmp_path / "logs", "lake")["samples/lake/5_epoch_3.json"]
    assert [message["role"] for message in sample["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample["input"] == sample["messages"][:2]
    answer = sample["messages"][2]
    assert answer["content"] == [{"type": "reasoning", "reasoning": "Look."}, {"type": "text", "text": "I look."}]
    assert [(call["function"], call["arguments"]) for call in answer["tool_calls"]] == [("ls", {"path": "/"})]
    assert sample["messages"][3]["content"] == "etc usr"
    assert {name: score["value"] for name, score in sample["scores"].items()} == {
        "reward": 0.5,
        "reward_goal": 0.25,
        "reward_format": 0.25,
    }


UNTYPED = {"Qwen3.5", "GLM-4.5"}
"""Families whose calls have no types of arguments, which a record does not know."""


@pytest.mark.parametrize(
    "name", ["Qwen3", "Llama-3.1, 3.3", "Mistral-Small", "DeepSeek-R1", "gpt-oss", *sorted(UNTYPED)]
)
def test_calls_and_thoughts_are_read_by_the_parsers_of_the_models_family(tmp_path, name):
    family, spools = FAMILIES[name], Spools(tmp_path / "campaign")
    builder = RecordBuilder(save_family(spools.campaign.model, family))
    builder.read(builder.template.render([FIRST[1]]))
    ids = builder.template.encode(family.write_call("look", {"x": 1}, thought="Hm."))
    builder.turns.append(EpisodeTurn(start=len(builder.ids), end=len(builder.ids) + len(ids)))
    builder.ids += ids
    builder.mask += [True] * len(ids)
    spools.scored(builder.record())
    assert export(spools, tmp_path / "logs") == 0
    *_, answer = read_log(tmp_path / "logs", "lake")["samples/lake/5_epoch_3.json"]["messages"]
    calls = [(call["function"], call["arguments"]) for call in answer["tool_calls"]]
    assert calls == [("look", {"x": "1" if name in UNTYPED else 1})]
    thought = [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": ""}]
    assert answer["content"] == (thought if family.thought else "")


@pytest.mark.parametrize(("names", "num_calls"), [({"tool_parser": "none"}, 0), ({"tool_parser": "vllm:hermes"}, 1)])
def test_the_recipe_names_the_parser_and_one_of_vllm_is_replaced_by_the_familys(forked, tmp_path, names, num_calls):
    assert export(name_parsers(forked, **names), tmp_path / "logs") == 0
    sample = read_log(tmp_path / "logs", "lake")["samples/lake/5_epoch_3.json"]
    assert len(sample["messages"][2].get("tool_calls", [])) == num_calls


def test_each_turn_is_one_model_event_in_the_span_of_its_conversation(forked, tmp_path):
    export(forked, tmp_path / "logs")
    sample = read_log(tmp_path / "logs", "lake")["samples/lake/5_epoch_3.json"]
    spans = {event["id"]: event["name"] for event in sample["events"] if event["event"] == "span_begin"}
    assert list(spans.values()) == ["conversation 1", "conversation 2 (branch of conversation 1)", "conversation 3"]
    turns = [event for event in sample["events"] if event["event"] == "model"]
    assert [spans[event["span_id"]][:14] for event in turns] == [f"conversation {n}" for n in (1, 1, 2, 3)]
    assert [event["output"]["choices"][0]["stop_reason"] for event in turns] == ["tool_calls", "stop", "stop", "stop"]
    assert expand_input(sample, turns[1])[1::2] == ["What is there?", "etc usr"]
    assert expand_input(sample, turns[2]) == ["Be brief.", "What is there?", "Quickly!"]
    assert expand_input(sample, turns[3]) == ["You are a sub-agent.", "Count."]
    assert [event["output"]["usage"]["output_tokens"] for event in turns] == [
        len(text) + 1 for text in (CALL, "Two directories.", "Files.", "2")
    ]
    assert [event["metadata"]["trained"] for event in turns] == [True, True, False, True]
    assert "trains another" in turns[2]["metadata"]["not_trained_because"]


def test_groups_are_samples_and_episodes_their_epochs(tmp_path, tiny_model_dir):
    spools = Spools(tmp_path / "campaign")
    spools.campaign.model.symlink_to(tiny_model_dir)
    spools.scored(*(make_lake_trajectory(group, index) for group in (0, 1) for index in (0, 1)))
    spools.scored(make_lake_trajectory(3, domain="taxi/../a b", reward=math.nan))
    spools.add("rollouts", unscored(make_lake_trajectory(0, status="env-fault", extra={"fault": "it broke"})))
    assert export(spools, tmp_path / "logs") == 0
    log = read_log(tmp_path / "logs", "lake")
    assert [(one["id"], one["epoch"], one["error"]) for one in log["summaries.json"]] == [
        ("lake/0", 1, None),
        ("lake/0", 2, None),
        ("lake/1", 1, None),
        ("lake/1", 2, None),
        ("lake/0 (env-fault)", 1, "env-fault: it broke"),
    ]
    head = log["header.json"]
    assert (head["eval"]["config"]["epochs"], head["results"]["total_samples"]) == (2, 5)
    assert head["results"]["completed_samples"] == 4
    (score,) = head["results"]["scores"]
    assert score["metrics"]["mean"]["value"] == pytest.approx(0.05)
    other = read_log(tmp_path / "logs", "taxi-a-b")
    assert [name for name in other if name.startswith("samples/")] == ["samples/taxi/../a b/3_epoch_1.json"]
    assert other["summaries.json"][0]["scores"]["reward"]["value"] == "nan"


def test_logs_without_a_tokenizer_show_ids_and_an_export_of_nothing_is_empty(tmp_path):
    spools = Spools(tmp_path / "campaign")
    assert export(spools, tmp_path / "none") == 0
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["hpcrl-export.json"]
    spools.scored(make_lake_trajectory())
    assert export(spools, tmp_path / "logs") == 0
    sample = read_log(tmp_path / "logs", "lake")["samples/lake/0_epoch_1.json"]
    assert [message["content"] for message in sample["messages"]] == ["2 77 78 3", "70 71 1", "2 36 3", "72"]


def test_logs_replace_only_logs_and_only_by_force(forked, tmp_path, capsys):
    assert export(forked, tmp_path / "logs") == 0
    assert export(forked, tmp_path / "logs") == 2
    assert export(forked, tmp_path / "logs", "--force") == 0
    (tmp_path / "precious").mkdir()
    assert export(forked, tmp_path / "precious", "--force") == 2
    assert "is not an export of hpcrl" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["campaign", "logs", "precious"]


READ_ALL = """
import sys
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries, write_eval_log
from inspect_ai.event import ModelEvent

(info,) = list_eval_logs(sys.argv[1])
log = read_eval_log(info, resolve_attachments=True)
write_eval_log(log, sys.argv[2])
again = read_eval_log(sys.argv[2], resolve_attachments=True)
assert log.model_dump(exclude={"samples"}) == again.model_dump(exclude={"samples"})
assert [one.model_dump() for one in log.samples] == [one.model_dump() for one in again.samples]
assert [one.id for one in read_eval_log_sample_summaries(info)] == [one.id for one in log.samples]
(sample,) = log.samples
turns = [event for event in sample.events if isinstance(event, ModelEvent)]
print(info.task, log.status, sample.epoch, sample.scores["reward"].value, sample.messages[2].tool_calls[0].function)
print([message.text for message in turns[2].input], turns[2].output.completion, turns[2].output.usage.output_tokens)
"""


@pytest.mark.skipif(not find_readers(), reason="needs the readers of exports (make .venv-readers/.done)")
def test_inspect_ai_reads_the_logs_and_writes_them_again_unchanged(forked, tmp_path):
    assert export(forked, tmp_path / "logs") == 0
    assert run_reader(READ_ALL, "logs", "again.eval", directory=tmp_path) == [
        "lake success 3 0.5 ls",
        "['Be brief.', 'What is there?', 'Quickly!'] Files. 7",
    ]
