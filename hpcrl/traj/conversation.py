"""Turn a trajectory into a conversation: the input and the output of the model, turn by turn.

TokenDecoder         turns token ids into text
load_token_decoder   loads the campaign's tokenizer, or notes why there is none
ChatExchange         the input and the output of one turn
build_conversation   makes the exchanges of a trajectory
chat_messages        the exchanges as messages with role and content
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import ModelConfig
from hpcrl.errors import HpcrlError
from hpcrl.spool.record import EpisodeTurn, Trajectory
from hpcrl.system.files import read_json


class ChatExchange(msgspec.Struct, frozen=True, kw_only=True):
    """The input and the output of the model in one turn. `turn` is None if the turn was not completed."""

    saw: str
    said: str
    start: int
    """Index of the first token of the input."""
    said_from: int
    """Index of the first token of the output."""
    end: int
    turn: EpisodeTurn | None
    versions: tuple[int, int] | None
    """The first and the last version that generated the output."""


@dataclass(frozen=True)
class TokenDecoder:
    """A decoder of token ids. Without a tokenizer (`chat` is None) it returns the ids themselves."""

    chat: Any
    missing_reason: str = ""
    """The reason for a missing tokenizer."""

    def decode_text(self, token_ids: Sequence[int]) -> str:
        if self.chat is not None:
            try:
                return str(self.chat.decode(token_ids))
            except (OverflowError, TypeError, ValueError):  # not ids of this tokenizer
                pass
        return " ".join(map(str, token_ids))

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token, special tokens included."""
        if self.chat is None:
            return ""
        try:
            text: str = self.chat.template.decode_token(token_id)
        except (OverflowError, TypeError, ValueError):
            return "?"
        return repr(text)[1:-1]

    def observation_text(self, token_ids: Sequence[int], *, is_first: bool) -> str:
        """Return the text of the environment, without what the chat template puts around it."""
        if self.chat is None:
            return self.decode_text(token_ids)
        before = self.chat.before_first if is_first else self.chat.before_next
        ids = list(token_ids)
        closing = tuple(self.chat.closing)
        if not is_first and tuple(ids[: len(closing)]) == closing:
            ids = ids[len(closing) :]
        if tuple(ids[: len(before)]) == tuple(before):
            ids = ids[len(before) :]
        after = tuple(self.chat.after_observation)
        if after and tuple(ids[-len(after) :]) == after:
            ids = ids[: -len(after)]
        return self.decode_text(ids)


def load_token_decoder(campaign: CampaignDir) -> TokenDecoder:
    """Load the tokenizer in the campaign's model directory."""
    try:
        from hpcrl.models.chat_layout import load_chat_layout

        return TokenDecoder(load_chat_layout(campaign.model, _read_model_config(campaign)))
    except ImportError as error:
        return TokenDecoder(None, f"{error.name} is missing: pip install 'hpcrl[local]'")
    except (HpcrlError, msgspec.MsgspecError, OSError, ValueError, KeyError, TypeError) as error:
        return TokenDecoder(None, str(error))


def _read_model_config(campaign: CampaignDir) -> ModelConfig:
    """Read [model] of the campaign's recipe, whose other tables may be those of another version of hpcrl."""
    recipe = read_json(campaign.recipe) if campaign.recipe.is_file() else {}
    return msgspec.convert(recipe.get("model", {}), ModelConfig)


def build_conversation(trajectory: Trajectory, decoder: TokenDecoder) -> list[ChatExchange]:
    """Return the exchange of every turn, and of one that was started after the last."""
    exchanges, position = [], 0
    for turn in trajectory.turns:
        exchanges.append(
            _build_exchange(trajectory, decoder, turn, start=position, output_start=turn.start, end=turn.end)
        )
        position = turn.end
    if position < len(trajectory):
        generated_indices = np.flatnonzero(trajectory.loss_mask[position:])
        output_start = position + int(generated_indices[0]) if len(generated_indices) else len(trajectory)
        exchanges.append(
            _build_exchange(trajectory, decoder, None, start=position, output_start=output_start, end=len(trajectory)),
        )
    return exchanges


def _build_exchange(
    trajectory: Trajectory, decoder: TokenDecoder, turn: EpisodeTurn | None, *, start: int, output_start: int, end: int
) -> ChatExchange:
    ids = trajectory.token_ids
    generating_versions = trajectory.versions[output_start:end][trajectory.loss_mask[output_start:end]]
    return ChatExchange(
        saw=decoder.observation_text(ids[start:output_start].tolist(), is_first=start == 0),
        said=decoder.decode_text(ids[output_start:end].tolist()),
        start=start,
        said_from=output_start,
        end=end,
        turn=turn,
        versions=(int(generating_versions[0]), int(generating_versions[-1])) if len(generating_versions) else None,
    )


def chat_messages(exchanges: Sequence[ChatExchange]) -> list[dict[str, str]]:
    """Return the exchanges as messages, the form that chat models are trained with."""
    message_list = []
    for exchange in exchanges:
        message_list.append({"role": "user", "content": exchange.saw})
        if exchange.end > exchange.said_from:
            message_list.append({"role": "assistant", "content": exchange.said})
    return message_list
