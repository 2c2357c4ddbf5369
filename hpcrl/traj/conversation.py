"""Turn a trajectory into its conversations: the input and the output of the model, turn by turn.

NUM_END_TOKENS       a constant
TokenDecoder         turns token ids into text, and input into messages
load_token_decoder   loads the campaign's tokenizer, or notes why there is none
ChatExchange         the input and the output of one turn
build_conversation   makes the exchanges of one row
find_main_row        the row that generated most
chat_messages        the exchanges as messages with role and content
MessageSplitter, make_message_splitter    cut what the model was shown into messages, as the chat template wrote them
restore_rows         gives rows to a record of the first schema, which kept some conversations among its facts
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import ModelConfig
from hpcrl.errors import CampaignError, HpcrlError
from hpcrl.spool.record import COLUMNS, ConversationRow, EpisodeTurn, Trajectory
from hpcrl.spool.rows import PlacedTurn, RowColumns, expand_row, list_placed_turns
from hpcrl.system.files import read_json

if TYPE_CHECKING:
    from hpcrl.models.chat_template import ChatTemplate
    from hpcrl.rollout.agents.answer_parser import AnswerParser


NUM_END_TOKENS = 32
"""The tokens at the end of a prompt in which a mark that opens an answer is looked for."""


class ChatExchange(msgspec.Struct, frozen=True, kw_only=True):
    """The input and the output of the model in one turn. Indices count from the first token of the row."""

    input_text: str
    output_text: str
    marked_text: str
    """The output with the special tokens that the decoder's parser reads."""
    prompt_end: str
    """The end of the prompt, likewise: it may have opened the thoughts."""
    start: int
    """Index of the first token of the input."""
    output_start: int
    """Index of the first token of the output."""
    end: int
    turn: EpisodeTurn | None
    """None if the turn was not completed."""
    versions: tuple[int, int] | None
    """The first and the last version that generated the output."""
    number: int | None = None
    """The index of the turn in the record."""
    is_closed: bool = False
    """True if a special token ends the output, so that the model itself ended its turn."""
    messages: list[dict[str, str]] = []
    """The input as messages; what the template writes before the answer is `opening`."""
    opening: str = ""


@dataclass(frozen=True)
class TokenDecoder:
    """A decoder of token ids. Without a tokenizer (`chat` is None) it returns the ids themselves."""

    chat: Any
    missing_reason: str = ""
    """The reason for a missing tokenizer."""
    splitter: "MessageSplitter | None" = None
    parser: "AnswerParser | None" = None
    """The parser of thoughts and tool calls, for exports that show these apart."""

    def decode_text(self, token_ids: Sequence[int]) -> str:
        if self.chat is not None:
            try:
                return str(self.chat.decode(token_ids))
            except (OverflowError, TypeError, ValueError):  # not ids of this tokenizer
                pass
        return " ".join(map(str, token_ids))

    def decode_marked(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer with the special tokens that the parser reads."""
        marks = self._read_marks
        pieces: list[str] = []
        run: list[int] = []
        for token in token_ids if marks else ():
            if token in marks:
                pieces += [self.decode_text(run), marks[token]] if run else [marks[token]]
                run = []
            else:
                run.append(token)
        return "".join([*pieces, self.decode_text(run if marks else token_ids)])

    @cached_property
    def _read_marks(self) -> Mapping[int, str]:
        if self.parser is None or self.chat is None:
            return {}
        ids = self.chat.template.mark_ids
        return {ids[mark]: mark for mark in self.parser.marks if mark in ids}

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

    def is_mark(self, token_id: int) -> bool:
        return self.splitter is not None and token_id in self.splitter.mark_texts

    def input_messages(self, ids: NDArray[np.int32], *, start: int, end: int) -> tuple[list[dict[str, str]], str]:
        """Return the messages in the input of one turn, and what the template wrote before the answer."""
        if self.splitter is None:
            text = self.observation_text(ids[start:end].tolist(), is_first=start == 0)
            return [{"role": "user", "content": text}], ""
        if start > 0 and self.is_mark(int(ids[start - 1])):
            start -= 1  # the mark that closed the last answer is part of what the template writes between messages
        return self.splitter.split_messages(ids[start:end].tolist())


def load_token_decoder(campaign: CampaignDir) -> TokenDecoder:
    """Load the tokenizer in the campaign's model directory."""
    try:
        from hpcrl.models.chat_layout import load_chat_layout

        layout = load_chat_layout(campaign.model, _read_model_config(campaign))
        return TokenDecoder(layout, splitter=make_message_splitter(layout.template))
    except ImportError as error:
        return TokenDecoder(None, f"{error.name} is missing: pip install 'hpcrl[local]'")
    except (HpcrlError, msgspec.MsgspecError, OSError, ValueError, KeyError, TypeError) as error:
        return TokenDecoder(None, str(error))


def _read_model_config(campaign: CampaignDir) -> ModelConfig:
    """Read [model] of the campaign's recipe, whose other tables may be those of another version of hpcrl."""
    recipe = read_json(campaign.recipe) if campaign.recipe.is_file() else {}
    if not isinstance(recipe, dict):
        raise CampaignError(f"{campaign.recipe} is damaged: it is not a table")
    return msgspec.convert(recipe.get("model", {}), ModelConfig)


def build_conversation(
    trajectory: Trajectory, decoder: TokenDecoder, *, row: int = 0, turns: Sequence[PlacedTurn] | None = None
) -> list[ChatExchange]:
    """Return the exchange of every turn of a row, and of one that was started after the last.

    `turns` are those of the row, for callers that have listed them for all rows.
    """
    turns = list_placed_turns(trajectory)[row] if turns is None else turns
    columns = expand_row(trajectory, row)
    exchanges, position = [], 0
    for placed in turns:
        exchanges.append(
            _build_exchange(columns, decoder, placed, turn=trajectory.turns[placed.number], start=position)
        )
        position = placed.end
    if position < len(columns):
        generated_indices = np.flatnonzero(columns.loss_mask[position:])
        output_start = position + int(generated_indices[0]) if len(generated_indices) else len(columns)
        unfinished = PlacedTurn(-1, output_start, len(columns))
        exchanges.append(_build_exchange(columns, decoder, unfinished, turn=None, start=position))
    return exchanges


def _build_exchange(
    columns: RowColumns, decoder: TokenDecoder, placed: PlacedTurn, *, turn: EpisodeTurn | None, start: int
) -> ChatExchange:
    ids = columns.token_ids
    versions = columns.versions[placed.start : placed.end]
    messages, opening = decoder.input_messages(ids, start=start, end=placed.start)
    return ChatExchange(
        input_text=decoder.observation_text(ids[start : placed.start].tolist(), is_first=start == 0),
        output_text=decoder.decode_text(output_ids := ids[placed.start : placed.end].tolist()),
        marked_text=decoder.decode_marked(output_ids),
        prompt_end=decoder.decode_marked(ids[max(placed.start - NUM_END_TOKENS, 0) : placed.start].tolist()),
        start=start,
        output_start=placed.start,
        end=placed.end,
        turn=turn,
        versions=(int(versions[0]), int(versions[-1])) if len(versions) else None,
        number=placed.number if turn is not None else None,
        is_closed=placed.end > placed.start and decoder.is_mark(int(ids[placed.end - 1])),
        messages=messages,
        opening=opening,
    )


def find_main_row(turns_by_row: Sequence[Sequence[PlacedTurn]]) -> int:
    """Return the row with the most generated tokens; of equal ones, the last."""
    return max(
        range(len(turns_by_row)),
        key=lambda row: (sum(turn.end - turn.start for turn in turns_by_row[row]), row),
    )


def chat_messages(exchanges: Sequence[ChatExchange]) -> list[dict[str, str]]:
    """Return the exchanges as messages, the form that chat models are trained with."""
    message_list = []
    for exchange in exchanges:
        message_list += exchange.messages
        if exchange.end > exchange.output_start:
            message_list.append({"role": "assistant", "content": exchange.opening + exchange.output_text})
    return message_list


class _StoredBranch(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as records of the first schema kept it, without the tokens that it shares with the trained one."""

    shares: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    loss_mask: list[bool]
    turns: list[EpisodeTurn]


def restore_rows(trajectory: Trajectory) -> Trajectory:
    """Return the record with the conversations that it keeps among its facts as rows; none of them is trained."""
    if trajectory.rows or "branches" not in trajectory.extra:
        return trajectory
    try:
        branches = msgspec.convert(trajectory.extra["branches"], list[_StoredBranch])
    except msgspec.ValidationError:  # a fact of that name with another meaning
        return trajectory
    if any(not 0 <= branch.shares <= len(trajectory) for branch in branches):
        return trajectory
    rows, turns, end = [ConversationRow(end=len(trajectory))], list(trajectory.turns), len(trajectory)
    for number, branch in enumerate(branches, start=1):
        move = end - branch.shares
        end += len(branch.token_ids)
        rows.append(ConversationRow(end=end, parent=0, shares=branch.shares))
        turns += [
            msgspec.structs.replace(turn, start=turn.start + move, end=turn.end + move, row=number, masked="choice")
            for turn in branch.turns
        ]
    return msgspec.structs.replace(
        trajectory,
        rows=rows,
        turns=turns,
        extra={name: value for name, value in trajectory.extra.items() if name != "branches"},
        **_join_columns(trajectory, branches),
    )


def _join_columns(trajectory: Trajectory, branches: Sequence[_StoredBranch]) -> Mapping[str, Any]:
    columns = {
        name: np.concatenate(
            [getattr(trajectory, name), *(np.asarray(getattr(branch, name), dtype) for branch in branches)]
        )
        for name, dtype in COLUMNS.items()
    }
    columns["loss_mask"][len(trajectory) :] = False
    return columns


# ---- the input of a turn as messages

ROLE_SEQUENCES = (
    ("user", "assistant", "user"),
    ("user", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "tool", "assistant"),
    ("user", "assistant", "tool", "tool", "user"),
)
"""The conversations that are rendered; a template may refuse some."""
_CONTENT = re.compile(r"Content number \d\.")


@dataclass(frozen=True, kw_only=True)
class MessageSplitter:
    """The texts between the messages of one chat template."""

    template: "ChatTemplate"
    mark_texts: Mapping[int, str]
    """The special tokens, by their id."""
    roles: Mapping[str, str]
    """The role of the message that follows each text."""
    pattern: re.Pattern[str]
    """Any of those texts, the longest first."""

    def split_messages(self, token_ids: Sequence[int]) -> tuple[list[dict[str, str]], str]:
        """Return the messages in tokens that end where the model generates, and the opening of its answer if any.

        What precedes the first text of the template is a system prompt, or what follows one that was cut.
        """
        messages, role, position = [], "system", 0
        text = self._decode(token_ids)
        for found in self.pattern.finditer(text):
            messages.append((role, text[position : found.start()]))
            role, position = self.roles[found[0]], found.end()
        opening = text[position:] if role == "assistant" else ""
        if role != "assistant":
            messages.append((role, text[position:]))
        shown = [{"role": role, "content": self._clean(content)} for role, content in messages]
        return [message for message in shown if message["content"].strip()], self._clean(opening)

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; characters that only look like a mark are guarded."""
        pieces: list[str] = []
        run: list[int] = []
        for token in token_ids:
            if token in self.mark_texts:
                pieces += [self._decode_run(run), self.mark_texts[token]]
                run = []
            else:
                run.append(token)
        return "".join([*pieces, self._decode_run(run)])

    def _decode_run(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self.template.guard(str(self.template.tokenizer.decode(token_ids, skip_special_tokens=False)))

    def _clean(self, text: str) -> str:
        """Return a content without guards, and without marks that close it."""
        from hpcrl.models.chat_template import GUARD_CHARACTER

        return self.template.mark_pattern.sub("", text).replace(GUARD_CHARACTER, "")


def make_message_splitter(template: "ChatTemplate") -> MessageSplitter | None:
    """Find what a template writes between messages; None if it writes nothing that separates them."""
    roles: dict[str, str] = {}
    for sequence in ROLE_SEQUENCES:
        for gap, role in _list_gaps(template, sequence):
            if gap.strip() and roles.get(gap) != "user":  # templates that write several roles alike write users
                roles[gap] = role
    texts = [gap for gap in roles if not _has_message_inside(gap, roles)]
    if not texts:
        return None
    return MessageSplitter(
        template=template,
        mark_texts={number: text for text, number in template.mark_ids.items()},
        roles=roles,
        pattern=re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))),
    )


def _list_gaps(template: "ChatTemplate", sequence: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what a template writes before each message of a conversation, with its role."""
    messages: list[Mapping[str, Any]] = [
        {"role": role, "content": f"Content number {number}."} for number, role in enumerate(sequence)
    ]
    try:
        rendered = template.render(messages)
    except HpcrlError:
        return
    gaps = _CONTENT.split(rendered)
    if len(gaps) == len(sequence) + 1:
        yield from zip(gaps, [*sequence, "assistant"], strict=True)


def _has_message_inside(gap: str, roles: Mapping[str, str]) -> bool:
    """Check whether a text has a default system prompt in it: it starts and ends with two other texts."""
    starts = [len(other) for other in roles if other != gap and gap.startswith(other)]
    ends = [len(other) for other in roles if other != gap and gap.endswith(other)]
    return bool(starts and ends) and max(starts) + max(ends) < len(gap)
