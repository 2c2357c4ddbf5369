"""Choose the trajectories that a report shows, in one pass over the facts of all; their text is bounded in bytes.

read_trajectories    the figures of all trajectories, with samples
MAX_TEXT_BYTES, GROUPS_TEXT_SHARE, MAX_TRAJECTORY_BYTES, MAX_TURN_CHARS    how much text is shown
MAX_TOKENS, MAX_UNLIKELY_TOKENS, MAX_UNLIKELY_PER_TURN    how many tokens

It reads segments, so it needs the interpreter of `hpcrl traj`.
"""

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import SpoolError
from hpcrl.report.charts import build_histogram
from hpcrl.report.figures import SampledGroup, SampledToken, SampledTrajectory, SampledTurn, TrajectoryFigures
from hpcrl.report.markup import esc
from hpcrl.spool.outcome import name_outcome
from hpcrl.spool.record import MASK_REASONS, TRAINABLE, Trajectory
from hpcrl.spool.rows import RowColumns, expand_row, list_placed_turns
from hpcrl.spool.segment import Segment, read_facts, read_segment
from hpcrl.spool.status import EpisodeStatus
from hpcrl.system.json_numbers import finite_or_none
from hpcrl.system.terminal import track_progress
from hpcrl.traj.conversation import (
    ChatExchange,
    TokenDecoder,
    build_conversation,
    find_main_row,
    load_token_decoder,
    restore_rows,
)
from hpcrl.traj.history import SeenIds, TrajectoryHistory

MAX_TEXT_BYTES = 3_000_000
"""The text of all trajectories of a campaign, as it is written in a page."""
GROUPS_TEXT_SHARE = 0.4
"""The share of it for whole groups, side by side."""
MAX_TRAJECTORY_BYTES = 40_000
MIN_TRAJECTORY_BYTES = 1_000
"""The text of a trajectory for which there is less room is left out."""
MAX_TURN_CHARS = 6_000
MAX_TOKENS = 160
"""The first tokens of a trajectory, which are shown with their log-probabilities."""
MAX_UNLIKELY_TOKENS, MAX_UNLIKELY_PER_TURN = 80, 10
"""The number of tokens behind them that are shown too: those with the lowest log-probabilities."""
MAX_SAMPLES = 150
MAX_HISTOGRAM_VALUES = 20_000
MAX_PROBLEMS = 20
_TURN_BYTES, _TOKEN_BYTES = 200, 75
"""The bytes of a page for a turn besides its text, and for a token with its log-probability."""
_NUM_BY_REASON = {"best": 3, "worst": 3, "longest": 2, "newest": 3, "failed": 4, "random": 5}
_NUM_GROUPS = {"widest spread": 3, "random": 3, "all alike": 1}


class _TurnRange(msgspec.Struct, frozen=True):
    start: int
    end: int


class _ChoiceFacts(msgspec.Struct, frozen=True):
    """The facts by which trajectories are chosen; the others are not parsed."""

    id: str
    group: str
    domain: str
    status: EpisodeStatus
    created: float
    turns: list[_TurnRange]
    outcome: str = ""
    reward: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum([turn.end - turn.start for turn in self.turns])


_DECODER = msgspec.json.Decoder(_ChoiceFacts, strict=False)


class _RowPlace(NamedTuple):
    """The place of a trajectory."""

    path: Path
    row: int


class _Candidate(NamedTuple):
    """A trajectory, or the places of a group, by how much it is wanted."""

    score: float
    order: int
    """Different for each, so that nothing else is compared."""
    places: tuple[_RowPlace, ...]
    group: str = ""


@dataclass
class _BestOf:
    """The candidates with the highest scores."""

    most: int
    heap: list[_Candidate] = field(default_factory=list)

    def is_wanted(self, score: float) -> bool:
        """Return whether a candidate with this score would be kept; nearly all are not."""
        return len(self.heap) < self.most or score > self.heap[0].score

    def offer(self, candidate: _Candidate) -> None:
        if len(self.heap) < self.most:
            heapq.heappush(self.heap, candidate)
        elif candidate > self.heap[0]:
            heapq.heapreplace(self.heap, candidate)

    def rank_candidates(self) -> list[_Candidate]:
        return sorted(self.heap, reverse=True)


@dataclass
class _TrajectorySampler:
    """The choice and the counts, while trajectories are passed by."""

    num: int = 0
    num_kept: int = 0
    num_groups: int = 0
    num_flat_groups: int = 0
    rewards: dict[str, Counter[float]] = field(default_factory=lambda: defaultdict(Counter))
    lengths: dict[str, Counter[float]] = field(default_factory=lambda: defaultdict(Counter))
    chosen: dict[tuple[str, str], _BestOf] = field(default_factory=dict)
    """The best candidates by domain and reason."""
    groups: dict[str, _BestOf] = field(default_factory=dict)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, facts: _ChoiceFacts, place: _RowPlace) -> None:
        """Count a trajectory, and keep it if it is wanted."""
        self.num += 1
        reward, length = finite_or_none(facts.reward), facts.num_tokens
        scores = {"newest": facts.created, "random": self._random.random()}
        if facts.status in TRAINABLE:
            self.num_kept += 1
            scores["longest"] = length
            _count_value(self.lengths[facts.domain], float(length))
            if reward is not None:
                scores |= {"best": reward, "worst": -reward}
                _count_value(self.rewards[facts.domain], reward)
        elif not facts.status.startswith("aborted"):
            scores = {"failed": facts.created}
        for reason, score in scores.items():
            best = self.chosen.get((facts.domain, reason))
            if best is None:
                best = self.chosen[facts.domain, reason] = _BestOf(_NUM_BY_REASON[reason])
            if best.is_wanted(score):
                best.offer(_Candidate(score, next(self._order), (place,)))

    def add_groups(self, members: dict[str, list[tuple[float, _RowPlace]]]) -> None:
        """Count the groups of a segment, and keep those that are wanted."""
        for group, rewards_and_places in members.items():
            rewards = [reward for reward, _ in rewards_and_places]
            if len(rewards) < 2:
                continue
            spread = _measure_spread(rewards)
            self.num_groups += 1
            self.num_flat_groups += spread == 0
            places = tuple(place for _, place in rewards_and_places)
            scores = {"random": self._random.random()} | (
                {"widest spread": spread} if spread else {"all alike": self._random.random()}
            )
            for reason, score in scores.items():
                best = self.groups.setdefault(reason, _BestOf(_NUM_GROUPS[reason]))
                best.offer(_Candidate(score, next(self._order), places, group))


def read_trajectories(campaign: CampaignDir, *, max_text_bytes: int = MAX_TEXT_BYTES) -> TrajectoryFigures:
    """Read the facts of all trajectories once, and the text of those that are chosen."""
    history = TrajectoryHistory(campaign)
    sampler = _TrajectorySampler()
    _offer_trajectories(history, sampler)
    decoder = load_token_decoder(campaign)
    reasons, candidates = _choose_samples(sampler), _choose_groups(sampler)
    num_attempts = sum(len(candidate.places) for _, candidate in candidates)
    group_bytes = int(max_text_bytes * GROUPS_TEXT_SHARE)
    writer = _SampleWriter(decoder, max_text_bytes=group_bytes, num=num_attempts)
    groups = list(_write_groups(candidates, writer))
    writer.add_room(max_text_bytes - group_bytes, num=len(reasons))
    sampled = list(_write_samples(reasons, writer))
    charts = [
        build_histogram("reward-histogram", "Rewards of trajectories", "reward", sampler.rewards),
        build_histogram("length-histogram", "Lengths of trajectories", "generated tokens", sampler.lengths),
    ]
    problems = [*history.problems.values(), *writer.problems]
    return TrajectoryFigures(
        num=sampler.num,
        num_kept=sampler.num_kept,
        num_groups=sampler.num_groups,
        num_flat_groups=sampler.num_flat_groups,
        sampled=sampled,
        groups=groups,
        charts=[chart for chart in charts if chart is not None],
        problems=list(dict.fromkeys(problems))[:MAX_PROBLEMS],
        missing=[f"token ids stand for the text: {decoder.missing_reason}"] if decoder.missing_reason else [],
    )


def _offer_trajectories(history: TrajectoryHistory, sampler: _TrajectorySampler) -> None:
    """Offer every trajectory to the sampler, each once."""
    seen = {True: SeenIds(), False: SeenIds()}
    for location in track_progress(history.segment_locations(), "trajectories are read"):
        try:
            segment_facts = read_facts(location.path)
        except SpoolError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # retired meanwhile
                history.problems[location.path] = str(error)
            continue
        members: dict[str, list[tuple[float, _RowPlace]]] = defaultdict(list)
        for index in range(len(segment_facts)):
            try:
                facts = _DECODER.decode(segment_facts.raw(index))
            except msgspec.MsgspecError as error:
                history.problems[location.path] = f"{location.path.name} has facts that cannot be read: {error}"
                continue
            if not seen[facts.status in TRAINABLE].add(facts.id):
                continue
            place = _RowPlace(location.path, index)
            sampler.add(facts, place)
            if facts.status in TRAINABLE and facts.reward is not None and math.isfinite(facts.reward):
                members[facts.group].append((facts.reward, place))
        sampler.add_groups(members)


def _measure_spread(values: Sequence[float]) -> float:
    """Return the standard deviation; `statistics` computes it exactly, and takes ten times as long."""
    if min(values) == max(values):
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _count_value(counts: Counter[float], value: float) -> None:
    """Count a value; a new one is rounded where there are too many, to three digits, then to two."""
    if value not in counts and len(counts) >= MAX_HISTOGRAM_VALUES:
        digits = 3 if len(counts) < 2 * MAX_HISTOGRAM_VALUES else 2
        value = float(f"{value:.{digits}g}")
    counts[value] += 1


def _choose_samples(sampler: _TrajectorySampler) -> dict[_RowPlace, list[str]]:
    """Return why each is chosen: first the first choice of every domain and reason, then the second ones."""
    reasons: dict[_RowPlace, list[str]] = {}
    ranked = {key: best.rank_candidates() for key, best in sampler.chosen.items()}
    order = {reason: number for number, reason in enumerate(_NUM_BY_REASON)}
    keys = sorted(ranked, key=lambda key: (order[key[1]], key[0]))
    for rank in range(max(_NUM_BY_REASON.values())):
        for key in keys:
            if rank < len(ranked[key]):
                place = ranked[key][rank].places[0]
                if place in reasons or len(reasons) < MAX_SAMPLES:
                    reasons.setdefault(place, []).append(key[1])
    return reasons


def _write_samples(reasons: Mapping[_RowPlace, Sequence[str]], writer: "_SampleWriter") -> Iterator[SampledTrajectory]:
    for place, chosen in reasons.items():
        found = writer.write(place, chosen=chosen, with_tokens=True)
        if found is not None:
            yield found


def _choose_groups(sampler: _TrajectorySampler) -> list[tuple[str, _Candidate]]:
    """Return groups, each with the first reason for which it is chosen."""
    chosen: dict[str, tuple[str, _Candidate]] = {}
    for reason in _NUM_GROUPS:
        for candidate in sampler.groups[reason].rank_candidates() if reason in sampler.groups else ():
            chosen.setdefault(candidate.group, (reason, candidate))
    return list(chosen.values())


def _write_groups(candidates: Iterable[tuple[str, _Candidate]], writer: "_SampleWriter") -> Iterator[SampledGroup]:
    for reason, candidate in candidates:
        found = [writer.write(place, chosen=[], with_tokens=False) for place in candidate.places]
        attempts = [one for one in found if one is not None]
        rewards = [one.reward for one in attempts if one.reward is not None]
        if rewards:
            yield SampledGroup(
                id=candidate.group,
                chosen=reason,
                domain=attempts[0].domain,
                reward_mean=fmean(rewards),
                reward_std=_measure_spread(rewards),
                attempts=attempts,
            )


class _SampleWriter:
    """Writes chosen trajectories, each with its part of the room that is left for their text."""

    def __init__(self, decoder: TokenDecoder, *, max_text_bytes: int, num: int) -> None:
        self._decoder = decoder
        self._left = max_text_bytes
        self._num = num
        """The trajectories that come."""
        self._segments: dict[Path, Segment | None] = {}
        self.problems: list[str] = []

    def add_room(self, max_text_bytes: int, *, num: int) -> None:
        """Make room for the text of more trajectories."""
        self._left += max_text_bytes
        self._num += num

    def write(self, place: _RowPlace, *, chosen: Sequence[str], with_tokens: bool) -> SampledTrajectory | None:
        """Return a trajectory with as much of its text as there is room for; None if it is gone."""
        allowance = min(self._left // max(self._num, 1), MAX_TRAJECTORY_BYTES)
        self._num -= 1
        segment = self._open_segment(place.path)
        if segment is None:
            return None
        try:
            trajectory = restore_rows(segment[place.row])
        except SpoolError as error:
            self.problems.append(str(error))
            return None
        conversation, note = self._write_conversation(trajectory, allowance, with_tokens=with_tokens)
        return SampledTrajectory(
            id=trajectory.id,
            chosen=list(chosen),
            domain=trajectory.domain,
            group=trajectory.group,
            status=trajectory.status,
            outcome=name_outcome(trajectory.status, trajectory.outcome),
            reward=finite_or_none(trajectory.reward),
            num_tokens=sum(turn.end - turn.start for turn in trajectory.turns),
            num_turns=len(trajectory.turns),
            start_version=trajectory.start_version,
            end_version=trajectory.end_version,
            created=trajectory.created,
            producer=trajectory.producer,
            conversation=conversation,
            note=note,
        )

    def _open_segment(self, path: Path) -> Segment | None:
        if path not in self._segments:
            self._segments.clear()  # the samples of one segment come together at best; mapped files are not kept
            try:
                self._segments[path] = read_segment(path, verify=False)
            except SpoolError as error:
                self.problems.append(str(error))
                self._segments[path] = None
        return self._segments[path]

    def _write_conversation(
        self, trajectory: Trajectory, allowance: int, *, with_tokens: bool
    ) -> tuple[list[SampledTurn], str]:
        notes = [str(trajectory.extra[name]) for name in ("fault", "reason") if name in trajectory.extra]
        if allowance < MIN_TRAJECTORY_BYTES:
            return [], "; ".join([*notes, "its text is left out, since the report would become too large"])
        turns_by_row = list_placed_turns(trajectory)
        row = find_main_row(turns_by_row)
        if len(turns_by_row) > 1:
            notes.append(f"conversation {row + 1} of {len(turns_by_row)}, in which most was generated")
        columns = expand_row(trajectory, row)
        exchanges = build_conversation(trajectory, self._decoder, row=row, turns=turns_by_row[row])
        turns, num_left, num_unlikely_left = [], MAX_TOKENS * with_tokens, MAX_UNLIKELY_TOKENS * with_tokens
        room = max(allowance - (num_left + num_unlikely_left) * _TOKEN_BYTES, MIN_TRAJECTORY_BYTES)
        most = min(MAX_TURN_CHARS, room // 4)
        shown, num_hidden = _choose_exchanges(exchanges, room, most=most)
        if num_hidden:
            notes.append(f"{num_hidden:,} turns in the middle are left out")
        for exchange in shown:
            for message in _list_messages(exchange):
                turns.append(_shorten_turn(message["role"], message["content"], most=most))
            middle = min(exchange.output_start + num_left, exchange.end)
            tokens = self._list_tokens(columns, range(exchange.output_start, middle), start=exchange.output_start)
            rest = columns.logprobs[middle : exchange.end]
            lowest = rest.argsort(kind="stable")[: min(MAX_UNLIKELY_PER_TURN, num_unlikely_left)]
            unlikely = sorted(middle + int(index) for index in lowest)
            turns.append(
                _make_answer(
                    exchange,
                    tokens,
                    self._list_tokens(columns, unlikely, start=exchange.output_start),
                    most=most,
                )
            )
            num_left, num_unlikely_left = num_left - len(tokens), num_unlikely_left - len(unlikely)
        self._left -= sum(
            len(esc(turn.text).encode(errors="replace"))
            + _TOKEN_BYTES * (len(turn.tokens) + len(turn.least_likely))
            + _TURN_BYTES
            for turn in turns
        )
        return turns, "; ".join(notes)

    def _list_tokens(self, columns: RowColumns, places: Iterable[int], *, start: int) -> list[SampledToken]:
        """Return the tokens at these places of a row; they are numbered from `start`."""
        return [
            SampledToken(
                text=self._decoder.decode_token(int(columns.token_ids[place])) or str(int(columns.token_ids[place])),
                logprob=round(float(columns.logprobs[place]), 4),
                version=int(columns.versions[place]),
                number=place - start + 1,
            )
            for place in places
        ]


def _list_messages(exchange: ChatExchange) -> Sequence[Mapping[str, Any]]:
    """Return what the model was sent; a text that no message explains is the user's."""
    return exchange.messages or [{"role": "user", "content": exchange.input_text}]


def _choose_exchanges(
    exchanges: Sequence[ChatExchange], allowance: int, *, most: int
) -> tuple[list[ChatExchange], int]:
    """Return the first and the last exchanges that fit, and the number of those between."""
    sizes = [
        sum(min(len(message["content"]), most) + _TURN_BYTES for message in _list_messages(exchange))
        + min(len(exchange.output_text), most)
        + _TURN_BYTES
        for exchange in exchanges
    ]
    kept: set[int] = set()
    order = [index for pair in itertools.zip_longest(range(len(sizes)), reversed(range(len(sizes)))) for index in pair]
    for index in order:
        if index is None or index in kept:
            continue
        allowance -= sizes[index]
        if allowance < 0 and kept:
            break
        kept.add(index)
    return [exchange for index, exchange in enumerate(exchanges) if index in kept], len(exchanges) - len(kept)


def _make_answer(
    exchange: ChatExchange, tokens: list[SampledToken], least_likely: list[SampledToken], *, most: int
) -> SampledTurn:
    answer = _shorten_turn("assistant", exchange.opening + exchange.output_text, most=most)
    turn = exchange.turn
    versions = exchange.versions
    fate = (
        "not completed"
        if turn is None
        else "trained"
        if not turn.masked
        else MASK_REASONS.get(turn.masked, turn.masked)
    )
    return msgspec.structs.replace(
        answer,
        reward=finite_or_none(turn.reward) if turn is not None else None,
        versions=""
        if versions is None
        else f"{versions[0]}"
        if versions[0] == versions[1]
        else f"{versions[0]}-{versions[1]}",
        fate=fate,
        num_tokens=exchange.end - exchange.output_start,
        generate_s=turn.generate_s if turn is not None else 0.0,
        step_s=turn.step_s if turn is not None else 0.0,
        tokens=tokens,
        least_likely=least_likely,
    )


def _shorten_turn(role: str, text: str, *, most: int) -> SampledTurn:
    """Return a message; of a long text the middle is left out."""
    if len(text) <= most:
        return SampledTurn(role=role, text=text)
    half = most // 2
    left_out = len(text) - 2 * half
    return SampledTurn(role=role, text=f"{text[:half]}\n[...]\n{text[-half:]}", num_left_out=left_out)
