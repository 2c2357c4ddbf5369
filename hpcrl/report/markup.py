"""Parts of a page: escaped text, figures as people read them, tables and bars.

esc             text as HTML, with control characters spelled out
format_number, format_time, format_share, count_tokens    figures
write_table     a table that can be scrolled
write_bar       a bar with parts
"""

import datetime
import html
import math
from collections.abc import Iterable, Sequence

from hpcrl.system.terminal import escape_controls


def esc(text: object) -> str:
    """Return text as HTML; characters that control terminals or turn lines around are spelled out."""
    return html.escape(escape_controls(str(text)))


def format_number(value: float | None) -> str:
    """Return a number with three significant digits; a dash for None."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count_tokens(num: int) -> str:
    """Return a number of tokens in words."""
    return "1 token" if num == 1 else f"{num:,} tokens"


def format_time(value: float | None) -> str:
    """Return a time of day in UTC."""
    if value is None:
        return "-"
    try:
        return datetime.datetime.fromtimestamp(value, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "-"


def format_share(value: float | None) -> str:
    """Return a share in percent."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def write_table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    is_tall: bool = False,
    is_full: bool = False,
    is_thin: bool = False,
) -> str:
    """Return a table; cells are HTML already. It can be scrolled, also by keyboard, where it is too wide."""
    names = [' class="num"' if index in numbers else "" for index in range(len(heads))]
    head = "".join(f'<th scope="col"{name}>{esc(text)}</th>' for text, name in zip(heads, names, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{name}>{cell}</td>" for cell, name in zip(row, names, strict=True)) + "</tr>"
        for row in rows
    )
    classes = " ".join(["full"] * is_full + ["thin"] * is_thin)
    tall, full = " tall" if is_tall else "", f' class="{classes}"' if classes else ""
    return (
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{esc(caption)}"><table{full}>'
        f"<caption>{esc(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def write_bar(parts: Sequence[tuple[float, float, str]], label: str, *, name: str = "bar") -> str:
    """Return a bar with parts from a share to a share, each with its class."""
    rects = "".join(
        f'<rect class="{kind}" x="{1000 * start:.1f}" y="0" width="{max(1000 * (end - start), 2):.1f}" height="16"/>'
        for start, end, kind in parts
        if end > start
    )
    return (
        f'<svg class="{name}" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label="{esc(label)}">'
        f'<rect class="back" width="1000" height="16"/>{rects}</svg>'
    )
