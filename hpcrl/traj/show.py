"""Show one trajectory, found by id, age or reward, as a readable conversation: `hpcrl traj show`.

find_trajectory, find_latest, find_reward_extreme, find_by_id   find it
FoundTrajectory     it and its location
show_trajectory     prints it
build_conversation_tree    draws its conversations, each from the last turn that it shares
describe_fate       whether a turn is trained, or why not
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import SpoolError
from hpcrl.monitor.screen_parts import FittedTable
from hpcrl.spool.outcome import is_failure, name_outcome
from hpcrl.spool.record import (
    MASK_REASONS,
    TRAINABLE,
    EpisodeTurn,
    Trajectory,
    TrajectoryFacts,
    list_columns,
    sum_phase_times,
)
from hpcrl.spool.rows import (
    PlacedTurn,
    RowColumns,
    RowSpan,
    count_by_fate,
    expand_row,
    list_placed_turns,
    list_row_turns,
    list_spans,
)
from hpcrl.spool.token_fates import FATE_TEXTS, FORCED
from hpcrl.system.terminal import (
    LABEL_WIDTH,
    STATUS_STYLES,
    draw_time_bar,
    escape_controls,
    escape_to_one_line,
    format_age,
    format_duration,
    format_number,
    format_timestamp,
    format_versions,
    make_console,
    print_json,
)
from hpcrl.traj import listing
from hpcrl.traj.conversation import (
    ChatExchange,
    TokenDecoder,
    build_conversation,
    find_main_row,
    load_token_decoder,
)
from hpcrl.traj.history import SegmentLocation, TrajectoryHistory, TrajectorySelection

FoundTrajectory = tuple[SegmentLocation, Trajectory]
MAX_OFFERED_IDS = 8
MAX_SHOWN_ROWS = 24
MAX_DEPTH = 5
"""The depth of a conversation; one that is deeper starts at the left again."""
_MAX_TABLE_ROWS = 5000
"""The tokens in a table; the next ones are in another, so that tables of a million need little memory."""
_NUM_PRINTED_LINES = 100
"""The lines of a text that are printed at once."""
MAX_SHOWN_TURNS = 12
"""The turns that are shown of one conversation: those at both ends, and those at which a shown conversation starts."""

IsClosed = Callable[[int], bool]
"""True of a token that ends a turn of the model."""


def find_trajectory(
    history: TrajectoryHistory, selection: TrajectorySelection, *, id_prefix: str | None, best: bool, worst: bool
) -> FoundTrajectory:
    """Find the trajectory that a command line names."""
    if id_prefix is not None:
        if best or worst:
            raise SpoolError(
                f"{id_prefix!r} and --{'best' if best else 'worst'} both name a trajectory: give only one of them"
            )
        return find_by_id(history, selection, id_prefix)
    return (
        find_reward_extreme(history, selection, sign=1 if best else -1)
        if best or worst
        else find_latest(history, selection)
    )


def find_latest(history: TrajectoryHistory, selection: TrajectorySelection) -> FoundTrajectory:
    """Find the one that ended last."""
    found = listing.find_newest(history, selection, limit=1)
    if not found:
        raise SpoolError(_not_found_message(history))
    return found[0]


def find_reward_extreme(history: TrajectoryHistory, selection: TrajectorySelection, *, sign: int) -> FoundTrajectory:
    """Find the highest (`sign` 1) or the lowest (-1) reward; of equal ones, the trajectory that ended last."""
    best: FoundTrajectory | None = None
    highest = (-math.inf, -math.inf)
    for location, trajectory in history.trajectories(selection):
        if trajectory.reward is None or not math.isfinite(trajectory.reward):
            continue
        value = (sign * trajectory.reward, trajectory.created)
        if best is None or value > highest:
            best, highest = (location, trajectory), value
    if best is None:
        raise SpoolError(f"{_not_found_message(history)} with a reward")
    return best


def find_by_id(history: TrajectoryHistory, selection: TrajectorySelection, id_prefix: str) -> FoundTrajectory:
    """Find the trajectory of an id or of a unique prefix of one; else name the nearest ids in the error."""
    matches: dict[str, FoundTrajectory] = {}
    nearest_ids: list[tuple[int, str]] = []
    for location, trajectory in history.trajectories(selection):
        if trajectory.id.startswith(id_prefix) and (len(matches) <= MAX_OFFERED_IDS or trajectory.id == id_prefix):
            if trajectory.id not in matches or trajectory.status in TRAINABLE:
                matches[trajectory.id] = (location, trajectory)
            if trajectory.id == id_prefix and trajectory.status in TRAINABLE:
                break
        elif not matches:
            _keep_nearest(nearest_ids, (_measure_similarity(id_prefix, trajectory.id), trajectory.id))
    if id_prefix in matches:
        return matches[id_prefix]
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        raise SpoolError(f"{id_prefix!r} matches several ids: {_format_offered_ids(list(matches))}; give a full one")
    if nearest_ids:
        names = _format_offered_ids([name for _, name in sorted(nearest_ids, reverse=True)])
        raise SpoolError(f"no trajectory {id_prefix!r} in {history.campaign.name}: there are {names} (`hpcrl traj ls`)")
    raise SpoolError(_not_found_message(history))


def _measure_similarity(one: str, other: str) -> int:
    """Count the characters that are the same at both ends."""
    return _common_prefix_length(one, other) + _common_prefix_length(one[::-1], other[::-1])


def _common_prefix_length(one: str, other: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _keep_nearest(nearest_ids: list[tuple[int, str]], candidate: tuple[int, str]) -> None:
    if candidate not in nearest_ids:
        heapq.heappush(nearest_ids, candidate)
        if len(nearest_ids) > 3:
            heapq.heappop(nearest_ids)


def _format_offered_ids(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:MAX_OFFERED_IDS])) + (", ..." if len(names) > MAX_OFFERED_IDS else "")


def _not_found_message(history: TrajectoryHistory) -> str:
    return f"campaign {history.campaign.name!r} has no such trajectory"


def show_trajectory(
    found: FoundTrajectory,
    *,
    campaign: CampaignDir,
    tokens: bool,
    as_json: bool,
    conversation: int | None = None,
    is_kept: bool = True,
) -> int:
    """Print a trajectory: the tree of its conversations if it has several, and one of them, counted from 1.

    The segment of one that is not kept is not named.
    """
    location, trajectory = found
    decoder = load_token_decoder(campaign)
    placed_turns = list_placed_turns(trajectory)
    row = find_main_row(placed_turns) if conversation is None else conversation - 1
    if not 0 <= row < len(placed_turns):
        raise SpoolError(
            f"--conversation {conversation}: {trajectory.id!r} has {_count_things(len(placed_turns), 'conversation')}"
        )
    exchanges = build_conversation(trajectory, decoder, row=row, turns=placed_turns[row])
    if as_json:
        print_json(_build_shown(location, trajectory, exchanges, row=row, tokens=tokens))
        return 0
    console = make_console(pipe_width=100)
    kept_in = str(location.path.relative_to(campaign.root)) if is_kept else None
    _print_head(console, trajectory, kept_in=kept_in)
    if trajectory.rows:
        console.print()
        console.print(build_conversation_tree(trajectory, placed_turns, shown=row, is_closed=decoder.is_mark))
    columns = expand_row(trajectory, row)
    for index, exchange in enumerate(exchanges):
        _print_exchange(console, exchange, turn_number=(index if exchange.number is None else exchange.number) + 1)
        rows = _iter_token_rows(columns, exchange, decoder) if tokens else iter(())
        while block := list(itertools.islice(rows, _MAX_TABLE_ROWS)):
            console.print(_build_token_table(block))
    _print_foot(console, trajectory, decoder)
    return 0


def _print_head(console: Console, trajectory: Trajectory, *, kept_in: str | None) -> None:
    status = Text(trajectory.status, style=STATUS_STYLES[trajectory.status])
    head = Text.assemble((escape_to_one_line(trajectory.id), "bold"), "   ", status)
    outcome = name_outcome(trajectory.status, trajectory.outcome)
    if is_failure(outcome):
        head.append(f"   failed ({outcome})", style="red")
    if trajectory.reward is not None:
        head.append("   scored " if is_failure(outcome) else "   reward ").append(
            format_number(trajectory.reward), style=_sign_style(trajectory.reward)
        )
    console.print(head)
    facts = [
        ("task", f"{escape_to_one_line(trajectory.group)}, seed {trajectory.seed}"),
        ("tokens", _format_token_counts(trajectory)),
        ("policy", f"version {format_versions(trajectory.start_version, trajectory.end_version)}"),
        (
            "ended",
            f"{format_timestamp(trajectory.created)}, {format_age(trajectory.created)} ago, "
            f"on {escape_to_one_line(trajectory.producer)}",
        ),
    ]
    if kept_in is not None:
        facts.append(("kept in", escape_to_one_line(kept_in)))
    if trajectory.extra:
        facts += [(escape_to_one_line(name), _format_fact(value)) for name, value in trajectory.extra.items()]
    console.print(_build_label_grid((Text(name, style="dim"), Text(value, overflow="fold")) for name, value in facts))


def _format_token_counts(trajectory: Trajectory) -> str:
    fates = count_by_fate(trajectory)
    num_generated = max(sum(fates.values()), int(trajectory.loss_mask.sum()))  # a last turn may be unfinished
    line = f"{len(trajectory):,}: {num_generated:,} generated, {len(trajectory) - num_generated:,} read"
    num_masked = num_generated - int(trajectory.loss_mask.sum())
    return f"{line}; {num_masked:,} of the generated ones are not trained" if num_masked else line


def _count_things(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def _format_fact(value: object) -> str:
    return escape_to_one_line(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _print_exchange(console: Console, exchange: ChatExchange, *, turn_number: int) -> None:
    console.print()
    title = Text(f"turn {turn_number}", style="bold")
    if exchange.turn is not None and exchange.turn.remote_prefill:
        title.append(" (remote prefill)", style="not bold dim")
    console.print(Rule(title, align="left", style="dim"))
    _print_passage(console, Text("input", style="dim"), exchange.input_text, style="")
    if exchange.end > exchange.output_start:
        _print_passage(console, Text("output", style="cyan"), exchange.output_text, style="bold cyan")
    console.print(_build_label_grid([(Text(""), _format_turn_figures(exchange))]))


def _print_passage(console: Console, label: Text, text: str, *, style: str) -> None:
    """Print a text by blocks of lines: rich takes a time that grows with the square of their number.

    An empty or blank text is made visible.
    """
    lines = escape_controls(text).strip("\n").split("\n")
    if not text.strip():
        lines, style = [escape_to_one_line(text).replace(" ", "\\x20") or "(no text)"], "dim"
    for start in range(0, len(lines), _NUM_PRINTED_LINES):
        block = Text("\n".join(lines[start : start + _NUM_PRINTED_LINES]), style=style, overflow="fold")
        console.print(_build_label_grid([(Text("") if start else label, block)]))


def _format_turn_figures(exchange: ChatExchange) -> Text:
    turn = exchange.turn
    num_generated = exchange.end - exchange.output_start
    version_text = f"version {format_versions(*exchange.versions)}" if exchange.versions else "no version"
    if turn is None:
        return Text(f"the episode ended before this turn did, {num_generated} tokens, {version_text}", style="yellow")
    figures = Text(style="dim")
    figures.append(f"reward {turn.reward:+.2f}", style=f"not dim {_sign_style(turn.reward)}" if turn.reward else "")
    num_tokens = "1 token" if num_generated == 1 else f"{num_generated:,} tokens"
    if turn.masked:
        fate, style = describe_fate(turn)
        figures.append(f" | {fate}", style=f"not dim {style}")
    figures.append(
        f" | {num_tokens} in {format_duration(turn.generate_s)} | step {format_duration(turn.step_s)} | {version_text}"
    )
    return figures


def _print_foot(console: Console, trajectory: Trajectory, decoder: TokenDecoder) -> None:
    console.print()
    console.print(Rule(style="dim"))
    parts = []
    if trajectory.reward is not None:
        # The parts in their order; a single part is the total and needs no sum.
        terms = " + ".join(
            f"{escape_to_one_line(name)} {format_number(value)}" for name, value in trajectory.reward_parts.items()
        )
        total = f" = {format_number(trajectory.reward)}" if len(trajectory.reward_parts) != 1 else ""
        parts.append((Text("reward", style="dim"), Text(f"{terms}{total}".removeprefix(" = "))))
    times = sum_phase_times(trajectory)
    bar = draw_time_bar(list(times.items()), width=20, ascii_only=console.options.ascii_only)
    parts.append((Text("time", style="dim"), Text(f"{format_duration(sum(times.values()))} ") + bar))
    console.print(_build_label_grid(parts))
    if decoder.missing_reason:
        console.print(f"token ids stand for the text: {escape_to_one_line(decoder.missing_reason)}", style="yellow")


def _build_token_table(rows: Sequence[Mapping[str, str]]) -> FittedTable:
    colours = ["cyan" if "version" in row else "dim" for row in rows]
    return FittedTable(
        rows,
        texts=("",),
        numbers=("token", "id", "log-prob", "teacher", "version"),
        last_texts=("text",),
        styles=[dict.fromkeys(row, colour) for row, colour in zip(rows, colours, strict=True)],
    )


def _iter_token_rows(columns: RowColumns, exchange: ChatExchange, decoder: TokenDecoder) -> Iterator[dict[str, str]]:
    """Yield the cells of each token; only a generated one has a version."""
    for index in range(exchange.start, exchange.end):
        token = int(columns.token_ids[index])
        row = {"": "input", "token": str(index), "id": str(token), "text": decoder.decode_token(token)}
        if index >= exchange.output_start:
            row |= {"": "output", "log-prob": f"{columns.logprobs[index]:.4f}", "version": f"{columns.versions[index]}"}
            if columns.teacher_logprobs is not None:
                row["teacher"] = f"{columns.teacher_logprobs[index]:.4f}"
        yield row


def _build_label_grid(rows: "Iterator[tuple[Text, Text]] | Sequence[tuple[Text, Text]]") -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for cells in rows:
        grid.add_row(*cells)
    return grid


def _sign_style(value: float) -> str:
    return "green" if value > 0 else "red" if value < 0 else "dim"


class ShownTrajectory(TrajectoryFacts, frozen=True, kw_only=True):
    """A trajectory with one of its conversations, as `show --json` prints it."""

    turns: list[ChatExchange]  # type: ignore[assignment]
    """The turns of the conversation."""
    conversation: int
    """The number of the conversation, counted from 1."""
    segment: str
    """The file that holds it."""
    token_ids: list[int] | UnsetType = UNSET
    """The columns of all conversations; only with --tokens."""
    logprobs: list[float | None] | UnsetType = UNSET
    versions: list[int] | UnsetType = UNSET
    loss_mask: list[bool] | UnsetType = UNSET
    teacher_logprobs: list[float | None] | UnsetType | None = UNSET


def _build_shown(
    location: SegmentLocation, trajectory: Trajectory, exchanges: list[ChatExchange], *, row: int, tokens: bool
) -> ShownTrajectory:
    facts = {name: getattr(trajectory, name) for name in TrajectoryFacts.__struct_fields__}
    columns: dict[str, Any] = dict(list_columns(trajectory)) if tokens else {}
    fields = {**facts, **columns, "turns": exchanges}
    return ShownTrajectory(**fields, conversation=row + 1, segment=str(location.path))


# ---- the tree of conversations


def describe_fate(turn: EpisodeTurn) -> tuple[str, str]:
    """Return whether a turn is trained, or why not, and its style."""
    if not turn.masked and turn.num_forced:
        return f"trained, but {turn.num_forced} {FATE_TEXTS[FORCED]}", "green"
    if not turn.masked:
        return "trained", "green"
    return f"not trained: {escape_to_one_line(MASK_REASONS.get(turn.masked, turn.masked))}", "yellow"


def build_conversation_tree(
    trajectory: Trajectory, placed_turns: Sequence[Sequence[PlacedTurn]], *, shown: int, is_closed: IsClosed
) -> Tree:
    """Draw the first conversations and the one that is shown; the others are counted."""
    spans, own_turns = list_spans(trajectory), list_row_turns(trajectory)
    shown_rows = sorted({*range(min(len(spans), MAX_SHOWN_ROWS)), shown})
    forks = _find_forks(shown_rows, placed_turns, own_turns)
    tree = Tree(Text(f"{len(spans):,} conversations", style="bold"), guide_style="dim")
    turn_nodes: dict[int, tuple[Tree, int]] = {}
    kept_turns = {turns[-1] for turns in forks.values() if turns}
    for row in shown_rows:
        parent, depth = next((turn_nodes[turn] for turn in reversed(forks[row]) if turn in turn_nodes), (tree, 0))
        if depth >= MAX_DEPTH:  # the line of the conversation names the one that it continues
            parent, depth = tree, 0
        node = parent.add(_describe_row(row, spans[row], trajectory, own_turns[row], is_shown=row == shown))
        for numbers in _elide_turns(own_turns[row], kept_turns):
            if len(numbers) == 1:
                line = _describe_turn(numbers[0], trajectory, is_closed=is_closed)
                turn_nodes[numbers[0]] = (node.add(line), depth + 1)
            else:
                node.add(Text(f"... {_count_turns(trajectory, numbers)}", style="dim"))
    hidden_rows = sorted(set(range(len(spans))) - set(shown_rows))
    if hidden_rows:
        numbers = [number for row in hidden_rows for number in own_turns[row]]
        text = f"... {len(hidden_rows):,} more conversations: {_count_turns(trajectory, numbers)}"
        tree.add(Text(text, style="dim"))
    return tree


def _find_forks(
    rows: Sequence[int], placed_turns: Sequence[Sequence[PlacedTurn]], own_turns: Sequence[Sequence[int]]
) -> dict[int, list[int]]:
    """Return for each row the turns that it shares with earlier ones, in order."""
    forks: dict[int, list[int]] = {}
    for row in rows:
        own = set(own_turns[row])
        forks[row] = [turn.number for turn in placed_turns[row] if turn.number not in own]
    return forks


def _elide_turns(numbers: Sequence[int], kept_turns: set[int]) -> Iterator[list[int]]:
    """Yield turns one by one, and in one list those of a long conversation that are left out."""
    half = MAX_SHOWN_TURNS // 2
    left_out: list[int] = []
    for index, number in enumerate(numbers):
        is_at_end = index < half or index >= len(numbers) - half
        if is_at_end or number in kept_turns or len(numbers) <= MAX_SHOWN_TURNS:
            if left_out:
                yield left_out
                left_out = []
            yield [number]
        else:
            left_out.append(number)


def _describe_row(row: int, span: RowSpan, trajectory: Trajectory, numbers: Sequence[int], *, is_shown: bool) -> Text:
    line = Text.assemble((f"conversation {row + 1}", "bold"))
    line.append(f"   {span.num_tokens:,} tokens, {_count_turns(trajectory, numbers)}", style="dim")
    if span.shares:
        line.append(f", the first {span.shares:,} shared with {span.parent + 1}", style="dim")
    if is_shown:
        line.append("   shown below", style="cyan")
    return line


def _count_turns(trajectory: Trajectory, numbers: Sequence[int]) -> str:
    turns = [trajectory.turns[number] for number in numbers]
    num_generated = sum(turn.end - turn.start for turn in turns)
    num_trained = sum(turn.end - turn.start - turn.num_forced for turn in turns if not turn.masked)
    fate = "all" if num_trained == num_generated else "none" if not num_trained else f"{num_trained:,}"
    return f"{len(turns):,} turn{'' if len(turns) == 1 else 's'}, {num_generated:,} generated, {fate} trained"


def _describe_turn(number: int, trajectory: Trajectory, *, is_closed: IsClosed) -> Text:
    turn = trajectory.turns[number]
    num_tokens = turn.end - turn.start
    line = Text(f"turn {number + 1}   {num_tokens:,} token{'' if num_tokens == 1 else 's'}")
    if turn.end > turn.start and is_closed(int(trajectory.token_ids[turn.end - 1])):
        line.append("   stop", style="dim")
    fate, style = describe_fate(turn)
    line.append(f"   {fate}", style=style)
    if turn.reward:
        line.append(f"   reward {turn.reward:+.2f}", style="green" if turn.reward > 0 else "red")
    return line
