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

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import HpcrlError
from hpcrl.spool.record import EpisodeTurn, Trajectory


class ChatExchange(msgspec.Struct, frozen=True, kw_only=True):
    """What the model saw and then said. `turn` is None where it never came to an end."""

    saw: str
    said: str
    start: int
    """Index of the first token that it saw."""
    said_from: int
    """Index of the first one that it said."""
    end: int
    turn: EpisodeTurn | None
    versions: tuple[int, int] | None
    """The first and the last version that spoke."""


@dataclass(frozen=True)
class TokenDecoder:
    """Turns ids into text; without a tokenizer (`chat` is None) into the ids."""

    chat: Any
    missing_reason: str = ""
    """Why there is no tokenizer."""

    def decode_text(self, token_ids: Sequence[int]) -> str:
        if self.chat is not None:
            try:
                return str(self.chat.decode(token_ids))
            except (OverflowError, TypeError, ValueError):  # no ids of this tokenizer
                pass
        return " ".join(map(str, token_ids))

    def decode_token(self, token_id: int) -> str:
        """One token by its name in the vocabulary, marks too."""
        if self.chat is None:
            return ""
        try:
            text = self.chat.tokenizer.decode([token_id], skip_special_tokens=False)
        except (OverflowError, TypeError, ValueError):
            return "?"
        return repr(text)[1:-1]

    def observation_text(self, token_ids: Sequence[int], *, is_first: bool) -> str:
        """What the environment said, without what the chat template puts around it."""
        if self.chat is None:
            return self.decode_text(token_ids)
        before = self.chat.before_first if is_first else self.chat.before_next
        ids = list(token_ids)
        if not is_first and ids[:1] == [self.chat.close]:
            ids = ids[1:]
        if tuple(ids[: len(before)]) == tuple(before):
            ids = ids[len(before) :]
        after = tuple(self.chat.after)
        if after and tuple(ids[-len(after) :]) == after:
            ids = ids[: -len(after)]
        return self.decode_text(ids)


def load_token_decoder(campaign: CampaignDir) -> TokenDecoder:
    """The tokenizer in the campaign's model directory."""
    try:
        from hpcrl.models.chat_layout import load_chat_layout

        return TokenDecoder(load_chat_layout(campaign.model))
    except ImportError as error:
        return TokenDecoder(None, f"{error.name} is missing: pip install 'hpcrl[local]'")
    except (HpcrlError, OSError, ValueError, KeyError, TypeError) as error:
        return TokenDecoder(None, str(error))


def build_conversation(trajectory: Trajectory, decoder: TokenDecoder) -> list[ChatExchange]:
    """Every turn, and what was begun after the last one."""
    exchanges, position = [], 0
    for turn in trajectory.turns:
        exchanges.append(_build_exchange(trajectory, decoder, turn, start=position, said_from=turn.start, end=turn.end))
        position = turn.end
    if position < len(trajectory):
        generated_indices = np.flatnonzero(trajectory.loss_mask[position:])
        said_from = position + int(generated_indices[0]) if len(generated_indices) else len(trajectory)
        exchanges.append(
            _build_exchange(trajectory, decoder, None, start=position, said_from=said_from, end=len(trajectory)),
        )
    return exchanges


def _build_exchange(
    trajectory: Trajectory, decoder: TokenDecoder, turn: EpisodeTurn | None, *, start: int, said_from: int, end: int
) -> ChatExchange:
    ids = trajectory.token_ids
    generating_versions = trajectory.versions[said_from:end][trajectory.loss_mask[said_from:end]]
    return ChatExchange(
        saw=decoder.observation_text(ids[start:said_from].tolist(), is_first=start == 0),
        said=decoder.decode_text(ids[said_from:end].tolist()),
        start=start,
        said_from=said_from,
        end=end,
        turn=turn,
        versions=(int(generating_versions[0]), int(generating_versions[-1])) if len(generating_versions) else None,
    )


def chat_messages(exchanges: Sequence[ChatExchange]) -> list[dict[str, str]]:
    """In the form that chat models are trained with."""
    message_list = []
    for exchange in exchanges:
        message_list.append({"role": "user", "content": exchange.saw})
        if exchange.end > exchange.said_from:
            message_list.append({"role": "assistant", "content": exchange.said})
    return message_list
