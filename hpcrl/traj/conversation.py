"""A trajectory as a conversation: what the model saw and said, turn by turn.

load_speech(run)              the campaign's tokenizer, or why there is none
conversation(trajectory, speech)    the exchanges; pure
messages(exchanges)           the same as role and content
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hpcrl.campaign_dir.paths import RunDir
from hpcrl.errors import HpcrlError
from hpcrl.spool.record import Trajectory, Turn


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What the model saw and then said. `turn` is None where it never came to an end."""

    saw: str
    said: str
    start: int
    """Index of the first token that it saw."""
    said_from: int
    """Index of the first one that it said."""
    end: int
    turn: Turn | None
    versions: tuple[int, int] | None
    """The first and the last version that spoke."""


@dataclass(frozen=True)
class Speech:
    """Turns ids into text; without a tokenizer (`chat` is None) into the ids."""

    chat: Any
    missing: str = ""
    """Why there is no tokenizer."""

    def text(self, token_ids: Sequence[int]) -> str:
        if self.chat is not None:
            try:
                return str(self.chat.decode(token_ids))
            except (OverflowError, TypeError, ValueError):  # no ids of this tokenizer
                pass
        return " ".join(map(str, token_ids))

    def token(self, token_id: int) -> str:
        """One token by its name in the vocabulary, marks too."""
        if self.chat is None:
            return ""
        try:
            text = self.chat.tokenizer.decode([token_id], skip_special_tokens=False)
        except (OverflowError, TypeError, ValueError):
            return "?"
        return repr(text)[1:-1]

    def observation(self, shown: Sequence[int], *, is_first: bool) -> str:
        """What the environment said, without what the chat template puts around it."""
        if self.chat is None:
            return self.text(shown)
        before = self.chat.before_first if is_first else self.chat.before_next
        ids = list(shown)
        if not is_first and ids[:1] == [self.chat.close]:
            ids = ids[1:]
        if tuple(ids[: len(before)]) == tuple(before):
            ids = ids[len(before) :]
        after = tuple(self.chat.after)
        if after and tuple(ids[-len(after) :]) == after:
            ids = ids[: -len(after)]
        return self.text(ids)


def load_speech(run: RunDir) -> Speech:
    """The tokenizer in the campaign's model directory."""
    try:
        from hpcrl.models.chat_layout import load_chat

        return Speech(load_chat(run.model))
    except ImportError as error:
        return Speech(None, f"{error.name} is missing: pip install 'hpcrl[local]'")
    except (HpcrlError, OSError, ValueError, KeyError, TypeError) as error:
        return Speech(None, str(error))


def conversation(trajectory: Trajectory, speech: Speech) -> list[Exchange]:
    """Every turn, and what was begun after the last one."""
    exchanges, place = [], 0
    for turn in trajectory.turns:
        exchanges.append(_exchange(trajectory, speech, turn, start=place, said_from=turn.start, end=turn.end))
        place = turn.end
    if place < len(trajectory):
        said = np.flatnonzero(trajectory.loss_mask[place:])
        said_from = place + int(said[0]) if len(said) else len(trajectory)
        exchanges.append(
            _exchange(trajectory, speech, None, start=place, said_from=said_from, end=len(trajectory)),
        )
    return exchanges


def _exchange(
    trajectory: Trajectory, speech: Speech, turn: Turn | None, *, start: int, said_from: int, end: int
) -> Exchange:
    ids = trajectory.token_ids
    spoke = trajectory.versions[said_from:end][trajectory.loss_mask[said_from:end]]
    return Exchange(
        saw=speech.observation(ids[start:said_from].tolist(), is_first=start == 0),
        said=speech.text(ids[said_from:end].tolist()),
        start=start,
        said_from=said_from,
        end=end,
        turn=turn,
        versions=(int(spoke[0]), int(spoke[-1])) if len(spoke) else None,
    )


def messages(exchanges: Sequence[Exchange]) -> list[dict[str, str]]:
    """In the form that chat models are trained with."""
    said = []
    for exchange in exchanges:
        said.append({"role": "user", "content": exchange.saw})
        if exchange.end > exchange.said_from:
            said.append({"role": "assistant", "content": exchange.said})
    return said
