"""Draw the conversations of an episode as a tree: each branches off at the last turn that it shares.

build_conversation_tree   the tree, with what is left out of a large one counted
describe_fate             whether a turn is trained, or why not
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text
from rich.tree import Tree

from hpcrl.spool.record import MASK_REASONS, EpisodeTurn, Trajectory
from hpcrl.spool.rows import PlacedTurn, RowSpan, list_row_turns, list_spans
from hpcrl.system.terminal import escape_to_one_line

MAX_SHOWN_ROWS = 24
MAX_DEPTH = 5
"""The depth of a conversation; one that is deeper starts at the left again."""
MAX_SHOWN_TURNS = 12
"""The turns that are shown of one conversation: those at both ends, and those at which a shown conversation starts."""

IsClosed = Callable[[int], bool]
"""Whether a token ends a turn of the model."""


def describe_fate(turn: EpisodeTurn) -> tuple[str, str]:
    """Return whether a turn is trained, or why not, and its style."""
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
    forks: dict[int, list[int]] = defaultdict(list)
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
    num_trained = sum(turn.end - turn.start for turn in turns if not turn.masked)
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
