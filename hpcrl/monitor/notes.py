"""The lines for a person, of which those with one cause are one line with a number.

NoteLog         the newest lines
MonitorNote     a line
make_cause      what faults have in common that differ in names and numbers only
MAX_NOTES       a limit
"""

import re
from collections.abc import Hashable, Iterator

import msgspec

MAX_NOTES = 50
MAX_CAUSE_CHARS = 256
_VARIABLE_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9]+")


class MonitorNote(msgspec.Struct, frozen=True, kw_only=True):
    """A line for a person."""

    time: float
    """The time of the newest of its events."""
    text: str
    bad: bool = False
    num: int = 1
    """The number of events of this cause."""
    is_least: bool = False
    """Only some of them are reported, with their number so far: there may be more."""
    number: int = 0
    """Its place among the lines to print: most causes are printed the 1st, 10th, 100th time."""

    @property
    def line(self) -> str:
        """The text with the number of events, if there are several: of faults before it, as they are alike."""
        if self.num == 1:
            return self.text
        num = f"{self.num:,}{'+' if self.is_least else ''}"
        return f"{num} x {self.text}" if self.bad else f"{self.text}, the last of {num}"


class NoteLog:
    """The newest notes, oldest first; of each cause one."""

    def __init__(self) -> None:
        self._notes: dict[Hashable, MonitorNote] = {}
        self.num_due = 0
        """The lines that were to print so far."""

    def __iter__(self) -> Iterator[MonitorNote]:
        return iter(self._notes.values())

    def add(
        self,
        *,
        time: float,
        text: str,
        bad: bool,
        cause: Hashable = None,
        num: int | None = None,
        prints_all: bool = False,
    ) -> None:
        """Add a note; `cause` is what it has in common with others, if anything, `num` their number, if it is known.

        With `prints_all` each is a line to print, also if the list has one line for all.
        """
        key = cause if cause is not None else self.num_due
        known = self._notes.pop(key, None)
        before = known.num if known is not None else 0
        count = max(num, before) if num is not None else before + 1
        if len(str(count)) > len(str(before)) or known is None or prints_all:
            self.num_due += 1
            number = self.num_due
        else:
            number = known.number
        self._notes[key] = MonitorNote(
            time=time, text=text, bad=bad, num=count, is_least=num is not None, number=number
        )
        if len(self._notes) > MAX_NOTES:
            del self._notes[next(iter(self._notes))]


def make_cause(*parts: str) -> tuple[str, ...]:
    """Return what is left of texts without quoted names and numbers."""
    return tuple(_VARIABLE_TEXT.sub("", part)[:MAX_CAUSE_CHARS] for part in parts)
