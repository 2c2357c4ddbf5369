"""Print safely: the output of models and environments may contain terminal control sequences."""

import contextlib
import datetime
import io
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

import msgspec
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

T = TypeVar("T")

# Controls (C0 and C1 except tab and newline), marks that reorder a line, line separators, lone surrogates, tags.
_UNSAFE_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
PIPE_WIDTH = 160
LABEL_WIDTH = 8
"""The width of a column of labels."""
BAR_STYLES = ("cyan", "blue", "magenta")
_BAR_MARKS, _ASCII_BAR_MARKS = (chr(0x2588), chr(0x2593), chr(0x2591)), ("#", "=", "-")

STATUS_STYLES = {
    "done": "green",
    "truncated": "yellow",
    "aborted-stale": "dim",
    "aborted-redundant": "dim",
    "env-fault": "red",
    "policy-fault": "red",
}


def escape_controls(text: str) -> str:
    """Spell out every character that could control a terminal: ESC becomes the four characters \\x1b."""
    return _UNSAFE_CHARACTERS.sub(_escape_character, text.replace("\r\n", "\n"))


def escape_to_one_line(text: str) -> str:
    """Escape as `escape_controls` does, and newlines and tabs too."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class PipeConsole(Console):
    """A console that shows text as it is, and leaves a closed pipe to the command, which ends as without one.

    A file or a pipe gets lines without the blanks that pad tables on a terminal.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, highlight=False, **options)
        if not self.is_terminal:
            self.push_render_hook(_PaddingRemover())

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _PaddingRemover(RenderHook):
    """Makes a console leave out the blanks at the ends of lines."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Unpadded(one) for one in renderables]


class _Unpadded:
    """The text of a renderable without the blanks at the ends of its lines."""

    def __init__(self, padded: ConsoleRenderable) -> None:
        self._padded = padded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for text, _, _ in console.render(self._padded, options):
            *whole, rest = text.split("\n")
            for part in whole:
                yield Segment((line + part).rstrip(" ") + "\n")
                line = ""
            line += rest
        yield Segment(line)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; Python has None for one that was closed before the start."""
    return stream is not None and stream.isatty()


def make_console(*, pipe_width: int = PIPE_WIDTH) -> Console:
    """Make a console as wide as $COLUMNS or the terminal, or `pipe_width` for a pipe.

    A character that cannot be shown becomes a question mark.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    is_sized = is_terminal(sys.stdout) or os.environ.get("COLUMNS", "").isdigit()
    return PipeConsole(markup=False, width=None if is_sized else pipe_width)


def print_line(text: str) -> None:
    """Print one line of the command's output; a character that cannot be shown becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)  # noqa: T201


def print_to_stderr(text: str) -> None:
    """Print one line to stderr, apart from the command's output."""
    print(escape_to_one_line(text).encode(errors="replace").decode(), file=sys.stderr)  # noqa: T201


def print_note(note: str) -> None:
    """Print a note of a command to stderr."""
    print_to_stderr(f"hpcrl: note: {note}")


def track_progress(items: Iterable[T], description: str, *, total: int | None = None) -> Iterable[T]:
    """Yield the items, with a progress bar on stderr if that is a terminal; `total` is for items without a length."""
    from rich.progress import track  # late: most commands show no progress

    console = PipeConsole(stderr=True)
    disabled = not items or not console.is_terminal
    return track(items, description, total=total, console=console, transient=True, disable=disabled)


@contextlib.contextmanager
def show_wait(description: str) -> Iterator[None]:
    """Show on stderr, if that is a terminal, that something takes its time."""
    console = PipeConsole(stderr=True)
    with console.status(Text(escape_to_one_line(description))) if console.is_terminal else contextlib.nullcontext():
        yield


def print_json(value: Any) -> None:
    """Print a value as JSON, with every character escaped that could control a terminal."""
    print_json_text(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_json_text(text: bytes) -> None:
    """Print a JSON document, with every character escaped that could control a terminal or cannot be shown."""
    escaped = _UNSAFE_CHARACTERS.sub(_escape_in_json, text.decode())
    try:
        escaped.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        escaped = _NOT_ASCII.sub(_escape_in_json, escaped)
    sys.stdout.write(escaped.rstrip("\n") + "\n")


def _escape_in_json(match: re.Match[str]) -> str:
    return "\\u007f" if match[0] == "\x7f" else json.dumps(match[0])[1:-1]


def format_age(timestamp: float, *, now: float | None = None) -> str:
    """Format how long ago a time was, in one unit."""
    seconds = (time.time() if now is None else now) - timestamp
    if not math.isfinite(seconds) or seconds < 0:
        return "?" if not math.isfinite(seconds) else "0 s"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_timestamp(timestamp: float) -> str:
    """Format a date with its time of day."""
    try:
        return datetime.datetime.fromtimestamp(timestamp).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"


def format_duration(seconds: float | None) -> str:
    """Format a duration in the unit that reads best; a dash for None."""
    if seconds is None:
        return "-"
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        return f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    return (
        f"{seconds:.1f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def format_bytes(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if abs(value) < 1000 else f"{value:.4g}"


def format_versions(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def draw_time_bar(parts: Sequence[tuple[str, float]], *, width: int, ascii_only: bool) -> Text:
    """Draw a bar and a legend that show where the time went; `parts` are in the order of the bar."""
    total = math.fsum(seconds for _, seconds in parts)
    bar, legend = Text(), Text()
    if not total or not math.isfinite(total):
        return Text("not measured", style="dim")
    edge, done = 0, 0.0
    for (name, seconds), mark, style in zip(
        parts, _ASCII_BAR_MARKS if ascii_only else _BAR_MARKS, BAR_STYLES, strict=False
    ):
        done += seconds
        bar.append(mark * (round(done / total * width) - edge), style=style)
        edge = round(done / total * width)
        legend.append("  ").append(mark, style=style).append(f" {name} {format_percent(seconds / total)}")
    return bar + legend


def format_percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 or not share else "<1%"


_BLOCKS = "".join(map(chr, range(0x2581, 0x2589)))
_ASCII_BLOCKS = "_.-=+*#@"


class Sparkline:
    """A series as a row of bars, as wide as the space allows."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = _ASCII_BLOCKS if options.ascii_only else _BLOCKS
        yield Segment(draw_sparkline(self.values, width=options.max_width, blocks=blocks), console.get_style("cyan"))


def draw_sparkline(values: Sequence[float], *, width: int, blocks: str = _BLOCKS) -> str:
    """Draw one character per finite value, or per mean of neighbours if there are more of them than `width`."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if not span:
        return blocks[0] * count
    return "".join(blocks[min(int((mean - low) / span * len(blocks)), len(blocks) - 1)] for mean in means)
