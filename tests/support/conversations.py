"""Turns of agent programs as the proxy records them, made without a program, and random trees of them."""

import itertools
from array import array

from hypothesis import strategies as st

from hpcrl.rollout.agents.episode_record import CHUNK_TOKENS, EpisodeFacts
from hpcrl.rollout.agents.recording import RecordedTurn, TurnPrompt
from hpcrl.rollout.agents.shared_sequence import SharedSequence
from tests.support.completions import make_completion

FACTS = EpisodeFacts(
    id="sums/1/0",
    group="sums/1",
    domain="sums",
    seed=1,
    status="done",
    producer="000-env-0",
    start_version=4,
    started_at=10.0,
    ended_at=20.0,
)
BLOCKS = [[], [1], [2], [1, 1], [1] * CHUNK_TOKENS, [2] * (CHUNK_TOKENS - 1), [1] * CHUNK_TOKENS + [2]]
"""Few different texts, shorter and longer than a chunk, so that conversations often start alike."""


def answer(
    number, parent, new_token_ids, token_ids, *, logprobs=None, is_trained=True, started_at=11.0, generate_s=0.25
):
    """Make a recorded turn; unless given, its log-probabilities differ from those of all other tokens."""
    distinct = [-number - position / 1024 for position in range(len(token_ids))]
    new = array("i", new_token_ids)
    return RecordedTurn(
        number=number,
        prompt=TurnPrompt(
            parent=parent, ids=parent.ids.extend(new) if parent else SharedSequence(new), text=SharedSequence("")
        ),
        completion=make_completion(
            token_ids,
            logprobs=distinct if logprobs is None else logprobs,
            versions=[number % 3 + position % 2 for position in range(len(token_ids))],
        ),
        text="",
        answer=None,
        is_trained=is_trained,
        started_at=started_at,
        generate_s=generate_s,
    )


TEXTS = st.lists(st.sampled_from(BLOCKS), max_size=3).map(lambda blocks: list(itertools.chain(*blocks)))


@st.composite
def call_trees(draw):
    turns = []
    for number in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from([None, *turns]))
        made = answer(number, parent, draw(TEXTS), draw(TEXTS), is_trained=draw(st.integers(0, 4)) > 0)
        turns.append(made)
    return turns
