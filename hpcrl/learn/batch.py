"""The input of a training step: the tokens of its trajectories in micro-batches.

    make_chosen_rows     a trajectory -> some of its shifted rows, one for each conversation
    TrainingRow          a row
    divide_credits       the credits of an episode's turns -> those of each row
    divide_rewards       the same, where a row's critic is to see the rewards of the whole episode
    spread_credit        give a turn's credit to all its tokens
    credit_last_token    give it to the last one
    move_to_tokens       give tokens their own rewards instead
    compute_row_lengths  the lengths of a trajectory's rows, without making them
    count_row_tokens     the numbers of their model tokens, without making them
    make_micro_batches   rows -> padded micro-batches of similar length
    make_packed_batches  rows -> micro-batches of one row each, which holds several rows in sequence
    MicroBatch           a micro-batch
    pad_to_length        a micro-batch with more padding
    pad_experts          its experts, likewise
    empty_micro_batch    a micro-batch without model tokens

Legend: B rows of a micro-batch, T positions (padded on the right), N model tokens of a micro-batch, K turns;
with experts: L layers that have some, K experts of a token
Dtypes: token ids int64, log-probs and advantages float32, masks bool

Position t of a row predicts token t + 1. The shift is made in `_make_row`, and nowhere else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcrl.spool.record import EpisodeTurn, Trajectory, TrajectoryFacts
from hpcrl.spool.routed_experts import make_unknown
from hpcrl.spool.rows import RowColumns, expand_row, list_row_turns, list_spans


@dataclass(frozen=True)
class TrainingRow:
    """A conversation, shifted: position t predicts token t + 1. The last position predicts a trained token."""

    inputs: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """The mask is True where the predicted token is trained; the columns below have only these positions."""
    targets: NDArray[np.int32]
    behaviour: NDArray[np.float32]
    credit: NDArray[np.float32]
    """The advantage of each predicted token, or its reward if a critic will turn rewards into advantages."""
    versions: NDArray[np.int32]
    """The weights that generated each predicted token."""
    teacher: NDArray[np.float32] | None = None
    """The log-probs under a teacher whose engine was asked."""
    experts: NDArray[Any] | None = None
    """The experts that engines sent each input token to (hpcrl.spool.routed_experts)."""

    def __len__(self) -> int:
        return len(self.inputs)


CreditPlacer = Callable[[NDArray[Any], NDArray[np.intp]], NDArray[Any]]
"""A function of the credits of a row's turns and the turn of each token; it returns the credit of each token."""


def make_chosen_rows(
    trajectory: Trajectory, chosen: Sequence[tuple[int, Sequence[float] | NDArray[Any]]], *, place_credit: CreditPlacer
) -> list[TrainingRow]:
    """Make rows of a trajectory, each given by its number and the credits of the turns it trains by their position."""
    spans, turns = list_spans(trajectory), list_row_turns(trajectory)
    return [
        _make_row(
            expand_row(trajectory, number, spans=spans),
            starts=[
                trajectory.turns[turn].start - spans[number].start + spans[number].shares for turn in turns[number]
            ],
            credit_K=np.asarray(credit, dtype=np.float32),
            place_credit=place_credit,
            token_rewards=[trajectory.turns[turn].token_rewards for turn in turns[number]],
        )
        for number, credit in chosen
    ]


def divide_credits(facts: TrajectoryFacts, credit_K: NDArray[Any]) -> list[NDArray[Any]]:
    """Return for each row the credits of the turns that it trains; an episode without turns has one credit."""
    return [credit_K[turns] for turns in list_row_turns(facts)] if facts.turns else [credit_K]


def divide_rewards(facts: TrajectoryFacts, rewards_K: NDArray[Any]) -> list[NDArray[Any]]:
    """Return for each row the rewards of the turns that it trains, and with them those earned in other rows later on.

    A reward counts for the last turn of each row that was answered by then, so that the return of every turn is that
    of the whole episode from there, in whichever rows it continues.
    """
    if not facts.rows:
        return divide_credits(facts, rewards_K)
    divided = []
    for turns in list_row_turns(facts):  # of one row, answered in the order of their positions
        earned = np.searchsorted(turns, np.arange(len(rewards_K)), side="right") - 1
        row_rewards = np.zeros(len(turns), dtype=rewards_K.dtype)
        np.add.at(row_rewards, earned[earned >= 0], rewards_K[earned >= 0])
        divided.append(row_rewards)
    return divided


def spread_credit(credit_K: NDArray[Any], turns_N: NDArray[np.intp]) -> NDArray[Any]:
    """Give every token of a turn the turn's value."""
    return np.asarray(credit_K[turns_N])


def credit_last_token(credit_K: NDArray[Any], turns_N: NDArray[np.intp]) -> NDArray[Any]:
    """Give the last token of a turn the turn's value, the others zero; an empty turn's goes to the token before."""
    placed_N = np.zeros(len(turns_N), dtype=credit_K.dtype)
    if len(turns_N):
        last_K = np.searchsorted(turns_N, np.arange(len(credit_K)), side="right") - 1
        np.add.at(placed_N, last_K.clip(min=0), credit_K)
    return placed_N


def compute_row_lengths(trajectory: Trajectory) -> list[int]:
    """Return the lengths of the trajectory's rows without making them."""
    if not trajectory.turns:
        rows = range(max(len(trajectory.rows), 1))
        trained = [np.flatnonzero(expand_row(trajectory, number).loss_mask[1:]) for number in rows]
        return [int(positions[-1]) + 1 if len(positions) else 0 for positions in trained]
    lengths = []
    for span, turns in zip(list_spans(trajectory), _list_trained_turns(trajectory), strict=True):
        end = max((_find_trained(trajectory, turn)[-1] + 1 for turn in turns), default=span.start)
        lengths.append(max(end - span.start + span.shares - 1, 0) if turns else 0)
    return lengths


def count_row_tokens(trajectory: Trajectory) -> list[int]:
    """Count the model tokens of each row; the first token of a row is not predicted."""
    if not trajectory.turns:
        rows = range(max(len(trajectory.rows), 1))
        return [int(np.count_nonzero(expand_row(trajectory, number).loss_mask[1:])) for number in rows]
    return [
        sum(len(_find_trained(trajectory, turn, first=span.start + (span.shares == 0))) for turn in turns)
        for span, turns in zip(list_spans(trajectory), _list_trained_turns(trajectory), strict=True)
    ]


def _list_trained_turns(trajectory: Trajectory) -> list[list[EpisodeTurn]]:
    """Return for each row its own turns that have tokens to train on."""
    return [
        [
            turn
            for turn in (trajectory.turns[number] for number in own)
            if not turn.masked and turn.end - turn.start > turn.num_forced
        ]
        for own in list_row_turns(trajectory)
    ]


def _find_trained(trajectory: Trajectory, turn: EpisodeTurn, *, first: int = 0) -> Sequence[int]:
    """Return the positions of a turn's trained tokens, from `first` on; a column is read only if some were forced."""
    start = max(turn.start, first)
    if not turn.num_forced:
        return range(start, turn.end)
    return [start + int(position) for position in np.flatnonzero(trajectory.loss_mask[start : turn.end])]


def move_to_tokens(
    credit_N: NDArray[Any], turns_N: NDArray[np.intp], offsets_N: NDArray[np.intp], token_rewards: Sequence[list[float]]
) -> None:
    """Move the rewards of tokens from the last token of their turn to where they were earned; sums stay the same.

    `offsets_N` is the place of each token in its turn. What a token earned that is not trained stays at the last one.
    """
    for turn in sorted(set(turns_N.tolist())):
        if rewards := token_rewards[turn]:
            of_turn = np.flatnonzero(turns_N == turn)
            earned = np.asarray(rewards, dtype=credit_N.dtype)[offsets_N[of_turn]]
            credit_N[of_turn] += earned
            credit_N[of_turn[-1]] -= earned.sum()


def _make_row(
    row: RowColumns,
    *,
    starts: Sequence[int],
    credit_K: NDArray[Any],
    place_credit: CreditPlacer,
    token_rewards: Sequence[list[float]],
) -> TrainingRow:
    model_positions = np.flatnonzero(row.loss_mask[1:])
    end = int(model_positions[-1]) + 1 if len(model_positions) else 0
    turns_N = (np.searchsorted(starts or [0], model_positions + 1, side="right") - 1).clip(min=0)
    credit_N = place_credit(credit_K, turns_N)
    if place_credit is credit_last_token and any(token_rewards):
        move_to_tokens(credit_N, turns_N, model_positions + 1 - np.asarray(starts)[turns_N], token_rewards)
    return TrainingRow(
        inputs=row.token_ids[:end],
        mask=row.loss_mask[1 : end + 1],
        targets=row.token_ids[1:][model_positions],
        behaviour=row.logprobs[1:][model_positions],
        credit=credit_N,
        versions=row.versions[1:][model_positions],
        teacher=None if row.teacher_logprobs is None else row.teacher_logprobs[1:][model_positions],
        experts=None if row.experts is None else row.experts[:end],
    )


@dataclass(frozen=True)
class MicroBatch:
    """The input of one pass through the model. Columns over N follow `mask_BT` row by row."""

    inputs_BT: Tensor
    mask_BT: Tensor
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    rows_N: Tensor
    """The training row of each token, the sequence of sequence-level losses; where rows are padded, its index."""
    positions_BT: Tensor | None = None
    """The position within its own row where rows are packed; they do not attend to each other."""
    teacher_N: Tensor | None = None
    """The log-probs under a teacher whose engine was asked; None unless all rows have them."""
    fresh_N: Tensor | None = None
    """True where the weights that the step starts from generated the token; None if their version is not known."""
    experts_BTLK: Tensor | None = None
    """The experts that engines sent each token to, in host memory: uint8 or int16, whose largest number and -1 mark a
    token without a choice. None if no row has any."""

    @property
    def num_sequences(self) -> int:
        """The number of training rows with model tokens."""
        return int(self.rows_N.max()) + 1 if len(self.rows_N) else 0

    @property
    def num_tokens(self) -> int:
        """The number of model tokens, the ones trained on."""
        return len(self.targets_N)

    @property
    def num_padded_tokens(self) -> int:
        return self.inputs_BT.numel()

    def count_replayed(self) -> Tensor:
        """Count the model tokens that are predicted from a token whose experts are known."""
        if self.experts_BTLK is None:
            return torch.zeros((), device=self.mask_BT.device)
        known_BT = self.experts_BTLK[:, :, 0, 0] != _find_none(self.experts_BTLK)
        return (known_BT.to(self.mask_BT.device) & self.mask_BT).sum().float()

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return a copy on a device; experts stay in host memory until their pass, as they are larger than the rest."""
        moved = {name: tensor.to(device) for name, tensor in vars(self).items() if tensor is not None}
        return replace(MicroBatch(**moved), experts_BTLK=self.experts_BTLK)


MIN_FILL_SHARE = 1 / 8
"""The share of the bound that a micro-batch fills before it refuses a row that needs much padding."""
MAX_PADDING_SHARE = 1 / 5
"""The share of a row beyond which padding is much."""


def make_micro_batches(
    rows: Sequence[TrainingRow], *, tokens_per_micro_batch: int, version: int | None = None
) -> list[MicroBatch]:
    """Batch rows of similar length, the longest first; a row longer than the bound goes alone.

    `version` is that of the weights that the step starts from.
    """
    batches: list[list[TrainingRow]] = []
    for row in sorted(rows, key=len, reverse=True):  # stable, so equal input gives equal batches
        if batches and _should_join(row, batches[-1], bound=tokens_per_micro_batch):
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_pad_rows(batch, version=version) for batch in batches]


def _should_join(row: TrainingRow, batch: Sequence[TrainingRow], *, bound: int) -> bool:
    longest = len(batch[0])
    fits = longest * (len(batch) + 1) <= bound
    is_wasteful = len(row) < (1 - MAX_PADDING_SHARE) * longest
    return fits and not (is_wasteful and longest * len(batch) >= MIN_FILL_SHARE * bound)


def make_packed_batches(
    rows: Sequence[TrainingRow], *, tokens_per_micro_batch: int, version: int | None = None
) -> list[MicroBatch]:
    """Pack rows into few micro-batches by first-fit, the longest first; a row longer than the bound goes alone."""
    batches: list[list[TrainingRow]] = []
    sizes: list[int] = []
    for row in sorted(rows, key=len, reverse=True):
        position = next((index for index, size in enumerate(sizes) if size + len(row) <= tokens_per_micro_batch), None)
        if position is None:
            batches.append([row])
            sizes.append(len(row))
        else:
            batches[position].append(row)
            sizes[position] += len(row)
    return [_pack_rows(batch, version=version) for batch in batches]


def _pad_rows(rows: Sequence[TrainingRow], *, version: int | None = None) -> MicroBatch:
    """Make one micro-batch. Padding is any valid token: in a causal model it changes nothing to its left."""
    shape = (len(rows), max(map(len, rows)))
    inputs_BT = np.zeros(shape, dtype=np.int64)
    mask_BT = np.zeros(shape, dtype=np.bool_)
    for index, row in enumerate(rows):
        inputs_BT[index, : len(row)] = row.inputs
        mask_BT[index, : len(row)] = row.mask
    return MicroBatch(
        inputs_BT=torch.from_numpy(inputs_BT),
        mask_BT=torch.from_numpy(mask_BT),
        experts_BTLK=_pad_experts(rows, length=shape[1]),
        **_concatenate_columns(rows, version=version),
    )


def _pack_rows(rows: Sequence[TrainingRow], *, version: int | None) -> MicroBatch:
    """Make one micro-batch without padding: transformers separates rows in attention where positions restart."""
    inputs_T = np.concatenate([row.inputs for row in rows]).astype(np.int64)
    positions_T = np.concatenate([np.arange(len(row)) for row in rows])
    mask_T = np.concatenate([row.mask for row in rows])
    return MicroBatch(
        inputs_BT=torch.from_numpy(inputs_T)[None],
        mask_BT=torch.from_numpy(mask_T)[None],
        positions_BT=torch.from_numpy(positions_T)[None],
        experts_BTLK=_pack_experts(rows),
        **_concatenate_columns(rows, version=version),
    )


def _pad_experts(rows: Sequence[TrainingRow], *, length: int) -> Tensor | None:
    """Return the experts of rows of this length, with no choice for padding; None if no row has any."""
    if (one := _find_experts(rows)) is None:
        return None
    padded_BTLK = make_unknown(len(rows) * length, like=one).reshape(len(rows), length, *one.shape[1:])
    for index, row in enumerate(rows):
        if row.experts is not None:
            padded_BTLK[index, : len(row)] = row.experts
    return _convert_experts(padded_BTLK)


def _pack_experts(rows: Sequence[TrainingRow]) -> Tensor | None:
    """Return the experts of rows that follow one another; None if no row has any."""
    if (one := _find_experts(rows)) is None:
        return None
    parts = [make_unknown(len(row), like=one) if row.experts is None else row.experts for row in rows]
    return _convert_experts(np.concatenate(parts)[None])


def _find_experts(rows: Sequence[TrainingRow]) -> NDArray[Any] | None:
    return next((row.experts for row in rows if row.experts is not None), None)


def _convert_experts(experts_BTLK: NDArray[Any]) -> Tensor:
    """Return a tensor of a type that torch computes with."""
    return torch.from_numpy(experts_BTLK if experts_BTLK.dtype == np.uint8 else experts_BTLK.view(np.int16))


def _concatenate_columns(rows: Sequence[TrainingRow], *, version: int | None) -> dict[str, Tensor]:
    """Concatenate the columns over N."""
    counts = [len(row.targets) for row in rows]
    taught = [row.teacher for row in rows if row.teacher is not None]
    columns = {"teacher_N": torch.from_numpy(np.concatenate(taught))} if len(taught) == len(rows) else {}
    if version is not None:
        columns["fresh_N"] = torch.from_numpy(np.concatenate([row.versions for row in rows]) == version)
    return columns | {
        "targets_N": torch.from_numpy(np.concatenate([row.targets for row in rows]).astype(np.int64)),
        "behaviour_N": torch.from_numpy(np.concatenate([row.behaviour for row in rows]).astype(np.float32)),
        "advantages_N": torch.from_numpy(np.concatenate([row.credit for row in rows]).astype(np.float32)),
        "rows_N": torch.from_numpy(np.arange(len(rows)).repeat(counts)),
    }


def pad_to_length(micro: MicroBatch, *, length: int) -> MicroBatch:
    """Add padding to the rows of a micro-batch, for ranks that divide their positions evenly."""
    padding = (0, length - micro.inputs_BT.shape[1], 0, 0)
    experts_BTLK = micro.experts_BTLK
    return replace(
        micro,
        experts_BTLK=None if experts_BTLK is None else pad_experts(experts_BTLK, padding),
        inputs_BT=torch.nn.functional.pad(micro.inputs_BT, padding),
        mask_BT=torch.nn.functional.pad(micro.mask_BT, padding),
    )


def pad_experts(experts_BTLK: Tensor, padding: Sequence[int]) -> Tensor:
    """Add tokens without a choice; `padding` is that of a tensor of [B, T]."""
    return torch.nn.functional.pad(experts_BTLK, (0, 0, 0, 0, *padding), value=_find_none(experts_BTLK))


def _find_none(experts_BTLK: Tensor) -> int:
    """Return the number that marks a token without a choice."""
    return 0xFF if experts_BTLK.dtype == torch.uint8 else -1


def empty_micro_batch() -> MicroBatch:
    """Make a micro-batch without model tokens, for a rank with fewer than another: all must run the same passes."""
    no_values = np.zeros(0, dtype=np.float32)
    no_ids = np.zeros(0, dtype=np.int32)
    empty = TrainingRow(
        inputs=np.zeros(1, np.int32),
        mask=np.zeros(1, np.bool_),
        targets=no_ids,
        behaviour=no_values,
        credit=no_values,
        versions=no_ids,
    )
    return _pad_rows([empty])
