"""Parts of a screen that take the place there is.

FittedScreen    parts above a rest, none taller than the terminal
FittedTable     a table of the columns that fit the width
WidthChoice     one of two forms, by the width
LongLines       what becomes of lines that are wider than the screen
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hpcrl.system.terminal import escape_to_one_line

LongLines = Literal["cut", "wrapped"]
_COLUMN_GAP = 2
NARROW_WIDTH = 40
_ATTEMPTS: tuple[tuple[LongLines, int, int], ...] = (
    ("wrapped", 1, 6),
    ("wrapped", 0, 4),
    ("cut", 1, 4),
    ("cut", 0, 2),
)
"""The forms of parts, the first choice first: long lines, lines between parts, lines that must be left for the rest."""

SegmentLines = list[list[Segment]]


class FittedScreen:
    """Parts and a rest of a given height: long lines are cut and parts move together only where they must."""

    def __init__(
        self,
        make_parts: Callable[[LongLines], Sequence[RenderableType]],
        make_rest: Callable[[int], RenderableType],
        *,
        height: int,
        kept: Literal["start", "end"] = "start",
    ) -> None:
        """Show parts, and a rest for a number of lines: if it has more, its start or its end is shown."""
        self._make_parts, self._make_rest = make_parts, make_rest
        self._height, self._kept = height, kept

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(height=None)
        lines, gap = self._fit_parts(console, free)
        lines += [[]] * gap
        left = max(self._height - len(lines), 1)
        rest = console.render_lines(self._make_rest(left), free, pad=False)
        if len(rest) > left:
            rest = rest[-left:] if self._kept == "end" else [*rest[: left - 1], _count_hidden(len(rest) - left + 1)]
        for line in [*lines, *rest]:
            yield from line
            yield Segment.line()

    def _fit_parts(self, console: Console, options: ConsoleOptions) -> tuple[SegmentLines, int]:
        """Return the lines of the parts, and the number of those between them."""
        parts: dict[LongLines, list[SegmentLines]] = {}
        for long_lines, gap, num_left in _ATTEMPTS:
            if long_lines not in parts:
                made = self._make_parts(long_lines)
                parts[long_lines] = [console.render_lines(part, options, pad=False) for part in made]
            lines = list(_join_parts(parts[long_lines], gap=gap))
            if len(lines) + gap + num_left <= self._height:
                return lines, gap
        num_shown = max(self._height - num_left, 1)
        if len(lines) > num_shown:
            lines = [*lines[: num_shown - 1], _count_hidden(len(lines) - num_shown + 1)]
        return lines, 0


def _join_parts(parts: Iterable[SegmentLines], *, gap: int) -> Iterator[list[Segment]]:
    for place, part in enumerate(parts):
        if place:
            yield from [[]] * gap
        yield from part


def _count_hidden(num_lines: int) -> list[Segment]:
    return [Segment(f"... {num_lines} more lines")]


class WidthChoice:
    """One of two forms of a part: on screens narrower than NARROW_WIDTH figures are wrapped, as cut ones mislead."""

    def __init__(self, wide: RenderableType, *, narrow: RenderableType) -> None:
        self._wide, self._narrow = wide, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._narrow if options.max_width < NARROW_WIDTH else self._wide


class FittedTable:
    """A table without the columns for which the screen is too narrow; earlier columns have the space first."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, str]],
        *,
        texts: Sequence[str],
        numbers: Sequence[str] = (),
        last_texts: Sequence[str] = (),
        styles: Sequence[Mapping[str, str]] = (),
        titles: Mapping[int, str] | None = None,
        long_names: LongLines = "cut",
    ) -> None:
        """Make columns of texts, of numbers that some row has, and of texts; `styles` are by row and column.

        A title is a separate line, before the row at its place. `long_names` is what becomes of a first column that
        is wider than the screen; a table with titles has one line a row, so it cuts them.
        """
        self._titles = titles or {}
        known = [name for name in numbers if any(row.get(name) for row in rows)]
        self._rows = [{name: escape_to_one_line(text) for name, text in row.items()} for row in rows]
        self._styles = styles
        self._long_names = long_names
        self._numbers = frozenset(numbers)
        self._names = [*texts, *known, *last_texts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._choose_widths(options.max_width)
        if self._long_names == "wrapped":
            yield self._make_wrapped(list(widths))
            return
        yield from self._draw_row({name: name for name in widths}, dict.fromkeys(widths, "dim"), widths, console)
        for place, row in enumerate(self._rows):
            if place in self._titles:
                title = escape_to_one_line(self._titles[place])
                yield Text(title, style="dim", no_wrap=True, overflow="ellipsis")
            yield from self._draw_row(row, self._styles[place] if place < len(self._styles) else {}, widths, console)

    def _draw_row(
        self, row: Mapping[str, str], styles: Mapping[str, str], widths: Mapping[str, int], console: Console
    ) -> Iterator[Segment]:
        """Yield one line; a table of rich's takes up to a minute for 32,000 of them."""
        gap = ""
        for name, width in widths.items():
            text = row.get(name, "")
            if cell_len(text) > width:
                text = set_cell_size(text, width - 1) + "…"
            padding = " " * (width - cell_len(text))
            style = console.get_style(styles[name]) if styles.get(name) else None
            yield Segment(gap + (padding + text if name in self._numbers else text + padding), style)
            gap = " " * _COLUMN_GAP
        yield Segment.line()

    def _make_wrapped(self, names: Sequence[str]) -> Table:
        """Make a table whose first column is wrapped where it is wider than the screen."""
        table = Table(box=None, padding=(0, _COLUMN_GAP, 0, 0), pad_edge=False, header_style="dim")
        for place, name in enumerate(names):
            table.add_column(
                name,
                justify="right" if name in self._numbers else "left",
                no_wrap=place > 0,
                overflow="ellipsis" if place else "fold",
            )
        for place, row in enumerate(self._rows):
            styles = self._styles[place] if place < len(self._styles) else {}
            table.add_row(*(Text(row.get(name, ""), style=styles.get(name, "")) for name in names))
        return table

    def _choose_widths(self, max_width: int) -> dict[str, int]:
        """Return the columns that fit, and their widths: the first always; a text that is the last may be cut."""
        widths: dict[str, int] = {}
        used = 0
        for name in self._names:
            width = self._measure_column(name)
            is_cut = name == self._names[-1] and name not in self._numbers
            if widths and used + (min(width, len(name)) if is_cut else width) > max_width:
                continue
            widths[name] = width
            used += width + _COLUMN_GAP
        last = next(reversed(widths))
        widths[last] = max(widths[last] - max(used - _COLUMN_GAP - max_width, 0), 1)
        return widths

    def _measure_column(self, name: str) -> int:
        return max(cell_len(text) for text in (name, *(row.get(name, "") for row in self._rows)))
