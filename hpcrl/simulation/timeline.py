"""The picture of a simulation's timeline: an SVG, or a page with it.

check_timeline_path    refuses a name before anything is simulated
draw_timeline          the picture
write_timeline         the file

A row for each role has a column for each span of time, the darker the busier; lines mark the ends of steps.
"""

from html import escape
from itertools import accumulate
from pathlib import Path

from hpcrl.errors import ConfigError
from hpcrl.simulation.result import SimulationResult, describe_result
from hpcrl.system.files import OUTPUT_MODE, find_output, publish_file

WIDTH, LEFT, ROW_HEIGHT, GAP = 1000, 90, 34, 8
_ROWS = {
    "decode": "#1b6ca8",
    "prefill": "#2a9d8f",
    "train": "#c1440e",
    "env": "#6a4c93",
    "running": "#555555",
}
_LABELS = {"running": "episodes"}
MAX_MARKS = 200


def draw_timeline(result: SimulationResult) -> str:
    """Draw the timeline as SVG."""
    bins = result.timeline
    end = max(result.seconds, 1e-9)
    names = [name for name in _ROWS if name != "prefill" or "prefill" in result.workers]
    height = len(names) * (ROW_HEIGHT + GAP) + 40
    scale = (WIDTH - LEFT - 10) / end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Timeline of {escape(result.recipe)}" font-family="sans-serif" font-size="12">'
    ]
    for row, name in enumerate(names):
        top = row * (ROW_HEIGHT + GAP) + 10
        parts.append(f'<text x="8" y="{top + ROW_HEIGHT / 2 + 4:g}">{_LABELS.get(name, name)}</text>')
        edges = [*(one.start_s for one in bins), end]
        for one, later in zip(bins, edges[1:], strict=True):
            share, left = getattr(one, name), LEFT + one.start_s * scale
            parts.append(
                f'<rect x="{left:.2f}" y="{top}" width="{max(0.2, (later - one.start_s) * scale):.2f}" '
                f'height="{ROW_HEIGHT}" fill="{_ROWS[name]}" fill-opacity="{share:.3f}"/>'
            )
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{end * scale:.2f}" height="{ROW_HEIGHT}" fill="none" stroke="#999"/>'
        )
    bottom = height - 30
    first = end - sum(result.steps)
    ends = list(accumulate(result.steps, initial=first)) if result.num_steps else []
    for moment in ends[:: max(1, len(ends) // MAX_MARKS)]:
        left = LEFT + moment * scale
        parts.append(f'<line x1="{left:.2f}" x2="{left:.2f}" y1="{bottom - 4}" y2="{bottom + 4}" stroke="#000"/>')
    parts.append(f'<text x="{LEFT}" y="{bottom + 20}">0</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{bottom + 20}" text-anchor="end">{end:.0f} s, steps marked</text></svg>')
    return "\n".join(parts) + "\n"


def check_timeline_path(path: Path) -> None:
    """Refuse a name that no picture can be written to."""
    if path.suffix not in (".svg", ".html"):
        raise ConfigError(f"--timeline {path}: give a name that ends with .svg or .html")
    if not path.parent.is_dir():
        raise ConfigError(
            f"--timeline {path}: the directory {str(path.parent)!r} does not exist: create it, or give another"
        )


def write_timeline(result: SimulationResult, path: Path) -> None:
    """Write the picture to a file, an SVG or a page by its name."""
    drawn = draw_timeline(result)
    if path.suffix == ".html":
        lines = "\n".join(map(escape, describe_result(result)))
        drawn = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{escape(result.recipe)}</title></head><body>\n{drawn}<pre>{lines}</pre>\n</body></html>\n"
        )
    try:
        publish_file(find_output(path), drawn.encode(), mode=OUTPUT_MODE)
    except OSError as error:
        raise ConfigError(f"--timeline {path} cannot be written: {error.strerror}") from error
