"""`hpcrl traj show`: one trajectory, found by id, newness or reward, as a readable conversation."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from hpcrl.campaign_dir.paths import RunDir
from hpcrl.errors import SpoolError
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.system.terminal import (
    STATUS_STYLES,
    ago,
    in_line,
    make_console,
    moment,
    number,
    print_json,
    safe,
    span,
    time_bar,
    versions,
)
from hpcrl.traj import listing
from hpcrl.traj.conversation import Exchange, Speech, conversation, load_speech
from hpcrl.traj.history import History, Place, Wanted

Found = tuple[Place, Trajectory]
NUM_OFFERED = 8
LABEL_WIDTH = 8


def find(history: History, wanted: Wanted, *, text: str | None, best: bool, worst: bool) -> Found:
    """The one that a command line means."""
    if text is not None:
        if best or worst:
            raise SpoolError(f"{text!r} and --{'best' if best else 'worst'} name one trajectory each: give one of them")
        return by_id(history, wanted, text)
    return extreme(history, wanted, sign=1 if best else -1) if best or worst else newest(history, wanted)


def newest(history: History, wanted: Wanted) -> Found:
    """The one that ended last."""
    found = listing.newest(history, wanted, limit=1)
    if not found:
        raise SpoolError(_none_in(history))
    return found[0]


def extreme(history: History, wanted: Wanted, *, sign: int) -> Found:
    """The one with the highest (`sign` 1) or the lowest (-1) reward; of equals the one that ended last."""
    best: Found | None = None
    highest = (-math.inf, -math.inf)
    for place, trajectory in history.trajectories(wanted):
        if trajectory.reward is None or not math.isfinite(trajectory.reward):
            continue
        value = (sign * trajectory.reward, trajectory.created)
        if best is None or value > highest:
            best, highest = (place, trajectory), value
    if best is None:
        raise SpoolError(f"{_none_in(history)} that has a reward")
    return best


def by_id(history: History, wanted: Wanted, text: str) -> Found:
    """The one of an id, or of the beginning of one if no other begins so; else those that come near are named."""
    matches: dict[str, Found] = {}
    near: list[tuple[int, str]] = []
    for place, trajectory in history.trajectories(wanted):
        if trajectory.id.startswith(text) and (len(matches) <= NUM_OFFERED or trajectory.id == text):
            if trajectory.id not in matches or trajectory.status in TRAINABLE:
                matches[trajectory.id] = (place, trajectory)
            if trajectory.id == text and trajectory.status in TRAINABLE:
                break
        elif not matches:
            _keep_nearest(near, (_likeness(text, trajectory.id), trajectory.id))
    if text in matches:
        return matches[text]
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        raise SpoolError(f"{text!r} begins more than one id: {_offered(list(matches))}; give one whole")
    if near:
        names = _offered([name for _, name in sorted(near, reverse=True)])
        raise SpoolError(f"no trajectory {text!r} in {history.run.name}: there are {names} (`hpcrl traj ls`)")
    raise SpoolError(_none_in(history))


def _likeness(one: str, other: str) -> int:
    """How many characters are the same at both ends."""
    return _same(one, other) + _same(one[::-1], other[::-1])


def _same(one: str, other: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _keep_nearest(near: list[tuple[int, str]], one: tuple[int, str]) -> None:
    if one not in near:
        heapq.heappush(near, one)
        if len(near) > 3:
            heapq.heappop(near)


def _offered(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:NUM_OFFERED])) + (", ..." if len(names) > NUM_OFFERED else "")


def _none_in(history: History) -> str:
    return f"campaign {history.run.name!r} has no such trajectory"


def show(found: Found, *, run: RunDir, tokens: bool, as_json: bool) -> int:
    """Print it."""
    place, trajectory = found
    speech = load_speech(run)
    exchanges = conversation(trajectory, speech)
    if as_json:
        print_json(_as_json(place, trajectory, exchanges, tokens=tokens))
        return 0
    console = make_console(pipe_width=100)
    _print_head(console, place, trajectory, run=run)
    for index, exchange in enumerate(exchanges):
        _print_exchange(console, exchange, number_=index + 1)
        if tokens:
            console.print(_token_table(trajectory, exchange, speech))
    _print_foot(console, trajectory, speech)
    return 0


def _print_head(console: Console, place: Place, trajectory: Trajectory, *, run: RunDir) -> None:
    status = Text(trajectory.status, style=STATUS_STYLES[trajectory.status])
    head = Text.assemble((in_line(trajectory.id), "bold"), "   ", status)
    if trajectory.reward is not None:
        head.append("   reward ").append(number(trajectory.reward), style=_sign_style(trajectory.reward))
    console.print(head)
    num_said = int(trajectory.loss_mask.sum())
    facts = [
        ("task", f"{in_line(trajectory.group)}, seed {trajectory.seed}"),
        ("tokens", f"{len(trajectory):,}: {num_said:,} said, {len(trajectory) - num_said:,} seen"),
        ("policy", f"version {versions(trajectory.start_version, trajectory.end_version)}"),
        ("ended", f"{moment(trajectory.created)}, {ago(trajectory.created)} ago, on {in_line(trajectory.producer)}"),
        ("kept in", in_line(str(place.path.relative_to(run.root)))),
    ]
    if trajectory.extra:
        facts += [(in_line(name), _plain(value)) for name, value in trajectory.extra.items()]
    console.print(_grid((Text(name, style="dim"), Text(value, overflow="fold")) for name, value in facts))


def _plain(value: object) -> str:
    return in_line(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _print_exchange(console: Console, exchange: Exchange, *, number_: int) -> None:
    console.print()
    title = Text(f"turn {number_}", style="bold")
    if exchange.turn is not None and exchange.turn.remote_prefill:
        title.append(" (remote prefill)", style="not bold dim")
    console.print(Rule(title, align="left", style="dim"))
    parts = [(Text("saw", style="dim"), _spoken(exchange.saw, style=""))]
    if exchange.end > exchange.said_from:
        parts.append((Text("said", style="cyan"), _spoken(exchange.said, style="bold cyan")))
    parts.append((Text(""), _turn_figures(exchange)))
    console.print(_grid(parts))


def _spoken(text: str, *, style: str) -> Text:
    """A text, and something to see where it has none."""
    if text.strip():
        return Text(safe(text).strip("\n"), style=style, overflow="fold")
    return Text(in_line(text).replace(" ", "\\x20") if text else "(no text)", style="dim", overflow="fold")


def _turn_figures(exchange: Exchange) -> Text:
    turn = exchange.turn
    num_said = exchange.end - exchange.said_from
    speaking = f"version {versions(*exchange.versions)}" if exchange.versions else "no version"
    if turn is None:
        return Text(f"the episode ended before this turn did, {num_said} tokens, {speaking}", style="yellow")
    figures = Text(style="dim")
    figures.append(f"reward {turn.reward:+.2f}", style=f"not dim {_sign_style(turn.reward)}" if turn.reward else "")
    num_tokens = "1 token" if num_said == 1 else f"{num_said:,} tokens"
    figures.append(f" | {num_tokens} in {span(turn.generate_s)} | step {span(turn.step_s)} | {speaking}")
    return figures


def _print_foot(console: Console, trajectory: Trajectory, speech: Speech) -> None:
    console.print()
    console.print(Rule(style="dim"))
    parts = []
    if trajectory.reward is not None:
        # Left to right as they were given; one part that is the whole needs no sum.
        terms = " + ".join(f"{in_line(name)} {number(value)}" for name, value in trajectory.reward_parts.items())
        total = f" = {number(trajectory.reward)}" if len(trajectory.reward_parts) != 1 else ""
        parts.append((Text("reward", style="dim"), Text(f"{terms}{total}".removeprefix(" = "))))
    bar = time_bar(times(trajectory), width=20, ascii_only=console.options.ascii_only)
    parts.append((Text("time", style="dim"), Text(f"{span(sum(s for _, s in times(trajectory)))} ") + bar))
    console.print(_grid(parts))
    if speech.missing:
        console.print(f"token ids stand for the text: {in_line(speech.missing)}", style="yellow")


def times(trajectory: Trajectory) -> list[tuple[str, float]]:
    """Seconds by what they were spent on."""
    return [
        ("generate", math.fsum(turn.generate_s for turn in trajectory.turns)),
        ("step", math.fsum(turn.step_s for turn in trajectory.turns)),
        ("reset", trajectory.reset_s),
    ]


def _token_table(trajectory: Trajectory, exchange: Exchange, speech: Speech) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in ("", "token", "id", "log-prob", "version"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis")
    for cells, style in _token_rows(trajectory, exchange, speech):
        table.add_row(*cells, style=style)
    return table


def _token_rows(trajectory: Trajectory, exchange: Exchange, speech: Speech) -> Iterator[tuple[list[Text], str]]:
    for index in range(exchange.start, exchange.end):
        mine = bool(trajectory.loss_mask[index])
        token = int(trajectory.token_ids[index])
        of_policy = [f"{trajectory.logprobs[index]:.4f}", f"{trajectory.versions[index]}"] if mine else ["", ""]
        text = in_line(speech.token(token))
        yield (
            [Text(cell) for cell in ("said" if mine else "saw", str(index), str(token), *of_policy, text)],
            ("cyan" if mine else "dim"),
        )


def _grid(rows: "Iterator[tuple[Text, Text]] | Sequence[tuple[Text, Text]]") -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for cells in rows:
        grid.add_row(*cells)
    return grid


def _sign_style(value: float) -> str:
    return "green" if value > 0 else "red" if value < 0 else "dim"


def _as_json(place: Place, trajectory: Trajectory, exchanges: Sequence[Exchange], *, tokens: bool) -> dict[str, object]:
    facts = {name: getattr(trajectory, name) for name in trajectory.__struct_fields__}
    columns = {name: facts.pop(name).tolist() for name in ("token_ids", "logprobs", "versions", "loss_mask")}
    facts["turns"] = exchanges
    return {**facts, "segment": str(place.path), **(columns if tokens else {})}
