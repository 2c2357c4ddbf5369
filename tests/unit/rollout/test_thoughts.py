"""An environment leaves thoughts out of later prompts: rows follow, and each generated token is trained once."""

import asyncio
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.envs.base import Step, TaskPrompt
from hpcrl.models.chat_layout import load_chat_layout
from hpcrl.rollout.agents.answer_parser import make_answer_reader
from hpcrl.rollout.agents.reasoning_parsers import REASONING_PARSERS
from hpcrl.rollout.episode import EpisodeLimits, run_episode
from hpcrl.rollout.tasks import AgentTask
from hpcrl.spool.record import attach_columns, pack_trajectory, parse_facts
from hpcrl.spool.rows import count_by_fate, expand_row, list_placed_turns
from hpcrl.testing.model_templates import FAMILIES, save_family
from hpcrl.traj.verify import record_error
from tests.support.completions import make_completion
from tests.support.reported_experts import check_known, report_experts

START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]


@cache
def layout_of(name):
    with tempfile.TemporaryDirectory() as directory:
        return load_chat_layout(save_family(Path(directory) / "model", FAMILIES[name]))


class Teller:
    """Returns these observations, and leaves thoughts out."""

    def __init__(self, observations, *, keep_thoughts=False):
        self.left = list(observations)
        self.keep_thoughts = keep_thoughts

    async def reset(self, seed):
        return TaskPrompt(messages=START, keep_thoughts=self.keep_thoughts)

    async def step(self, action):
        return Step(observation=self.left.pop(0), reward=1.0, done=not self.left)

    async def close(self):
        pass


class Answerer:
    """Generates these texts; the log-probability of each token is another."""

    def __init__(self, layout, texts):
        self.requests, self.answers = [], []
        self._layout, self._texts = layout, list(texts)

    async def generate(self, request):
        ids = self._layout.template.encode(self._texts[len(self.answers)])
        logprobs = [-len(self.answers) - place / 1024 for place in range(len(ids))]
        self.requests.append(request)
        experts = report_experts([*request.token_ids, *ids], request.experts_from)
        self.answers.append(make_completion(ids, version=5, logprobs=logprobs, experts=experts))
        return self.answers[-1]


def play(texts, *, family="Qwen3", context_length=100_000, records_experts=False, **env_options):
    """Play an episode of these answers; return its record as a reader gets it, and what generated it."""
    layout = layout_of(family)
    policy = Answerer(layout, texts)

    async def make_env():
        return Teller([f"observation {number}" for number in range(len(texts))], **env_options)

    trajectory = asyncio.run(
        run_episode(
            AgentTask(domain="lake", number=3, seed=11),
            index=0,
            make_env=make_env,
            layout=layout,
            policy=policy,
            limits=EpisodeLimits(
                max_turns=len(texts),
                max_new_tokens=99,
                context_length=context_length,
                max_lag=1,
                env_retries=0,
                records_experts=records_experts,
            ),
            newest_version=lambda: 5,
            producer="000-env-0",
            read_answer=make_answer_reader(layout.template, lambda: REASONING_PARSERS["think"]),
        )
    )
    packed = pack_trajectory(trajectory)
    return attach_columns(parse_facts(packed.facts), packed.columns), policy


def list_rows(record):
    return [expand_row(record, number) for number in range(max(len(record.rows), 1))]


THOUGHTS = ["", "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n", "<think>", "hm</think>"]
ANSWERS = st.lists(
    st.tuples(
        st.sampled_from(THOUGHTS), st.sampled_from(["", "yes", " a  b\n", "yes"]), st.sampled_from(["", "<|im_end|>"])
    ),
    min_size=1,
    max_size=7,
).map(lambda parts: ["".join(part) for part in parts])


@given(ANSWERS)
def test_every_generated_token_is_in_the_loss_once_and_each_row_is_what_the_engine_saw(texts):
    record, policy = play(texts)
    assert record_error(record, is_scored=False) is None
    rows = list_rows(record)
    trained = Counter(
        pair for row in rows for pair in zip(row.token_ids[row.loss_mask], row.logprobs[row.loss_mask], strict=True)
    )
    assert trained == Counter(
        pair for answer in policy.answers for pair in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert count_by_fate(record)["trained"] == trained.total()
    for row, placed in zip(rows, list_placed_turns(record), strict=True):
        number, start, end = placed[-1]
        assert row.token_ids[:start].tolist() == policy.requests[number].token_ids
        assert row.token_ids[start:end].tolist() == policy.answers[number].token_ids
        assert end == len(row)
    assert [turn.reward for turn in record.turns] == [1.0] * len(texts)


@given(ANSWERS)
def test_each_row_has_the_experts_of_all_its_tokens_but_the_last(texts):
    record, _ = play(texts, records_experts=True)
    for row in list_rows(record):
        check_known(row, [True] * (len(row) - 1) + [False])


def test_prompts_are_what_the_template_makes_of_the_conversation_without_thoughts():
    texts = ["<think>\nhm\n</think>\n\none<|im_end|>", "<think>\nso\n</think>\n\ntwo<|im_end|>", "three<|im_end|>"]
    record, policy = play(texts)
    template = layout_of("Qwen3").template
    messages = list(START)
    for number, word in enumerate(["one", "two", "three"]):
        assert policy.requests[number].token_ids == template.encode(template.render(messages))
        messages += [{"role": "assistant", "content": word}, {"role": "user", "content": f"observation {number}"}]
    assert len(record.rows) == 3
    assert record.rows[2].shares > record.rows[1].shares > 0


def test_thoughts_stay_unless_the_environment_drops_them():
    texts = ["<think>\nhm\n</think>\n\none<|im_end|>", "two<|im_end|>"]
    record, policy = play(texts, keep_thoughts=True)
    assert record.rows == []
    assert "hm" in layout_of("Qwen3").template.decode(policy.requests[1].token_ids)


def test_answers_without_thoughts_stay_one_row_exactly_as_generated():
    record, policy = play(["one<|im_end|>", " two ", "three<|im_end|>"])
    assert record.rows == []
    for before, answer, after in zip(policy.requests, policy.answers, policy.requests[1:], strict=False):
        whole = [*before.token_ids, *answer.token_ids]
        assert after.token_ids[: len(whole)] == whole


def test_a_thought_that_is_left_out_makes_room_in_the_context():
    texts = [f"<think>\n{'m' * 300}\n</think>\n\nok<|im_end|>"] * 4
    assert len(play(texts, context_length=600)[0].turns) == 4
    assert play(texts, context_length=600, keep_thoughts=True)[0].status == "truncated"


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3-2507 thinking", "Qwen3.5", "DeepSeek-R1", "GLM-4.5"])
def test_no_prompt_has_a_thought_of_an_earlier_turn(family):
    known = FAMILIES[family]
    texts = [known.write_answer("yes", thought=f"secret{number}") for number in range(3)]
    _, policy = play(texts, family=family)
    template = layout_of(family).template
    assert not any("secret" in template.decode_all(request.token_ids) for request in policy.requests)
