"""Read single keys of a terminal while a campaign is watched; without a terminal there are none.

open_keys    opens those of this process's terminal
KeyReader    waits for a key, and keeps the page that is shown
ScreenPage   the pages
PAGE_KEYS    the key of each page
HELP_LINES   what each key does
KEY_HINT     a line that names them
"""

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from typing import Literal

ScreenPage = Literal["overview", "advisories", "events", "roles", "logs", "trajectories", "help"]
PAGE_KEYS: dict[str, ScreenPage] = {
    "o": "overview",
    "a": "advisories",
    "e": "events",
    "r": "roles",
    "l": "logs",
    "t": "trajectories",
    "h": "help",
    "?": "help",
}
KEY_HINT = "q quit  h help  a advisories  e events  r roles  l logs  t trajectories"
HELP_LINES = (
    "a   what is wrong, with figures, causes and remedies",
    "e   recent events in full",
    "r   the workers of a role; n: of the next role",
    "l   the end of the log of a role; n: of the next role",
    "t   the newest trajectories",
    "o   the overview; so does the key of a page that is shown",
    "q   stop watching; the campaign continues",
    "hpcrl logs NAME [ROLE], hpcrl traj show NAME ID and hpcrl report NAME show more",
)
_NEXT_ROLE_KEY = "n"
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?")
"""The characters that a terminal sends for an arrow, a function key, or a letter with Alt."""
_QUIT_KEYS = ("q", "Q")


class KeyReader:
    """The keys of one terminal."""

    def __init__(self, *, fd: int | None = None) -> None:
        """Read keys from a terminal; without one, only wait."""
        self.page: ScreenPage = "overview"
        self.num_roles_passed = 0
        """The number of times that the next role was chosen."""
        self._fd = fd

    @property
    def has_keys(self) -> bool:
        return self._fd is not None

    def wait(self, seconds: float) -> None:
        """Wait until the time is over or a key changes the page; the key that quits is as Ctrl-C."""
        if self._fd is None:
            time.sleep(seconds)
            return
        ready, _, _ = select.select([self._fd], [], [], seconds)
        pressed = self._read_pressed() if ready else ""
        for key in _ESCAPE_SEQUENCE.sub("", pressed):
            if key in _QUIT_KEYS:
                raise KeyboardInterrupt
            self.num_roles_passed += key.lower() == _NEXT_ROLE_KEY
            page = PAGE_KEYS.get(key.lower())
            if page is not None:
                self.page = "overview" if page == self.page else page

    def _read_pressed(self) -> str:
        """Return what was typed; a terminal that is gone is never waited for again."""
        pressed = b""
        with contextlib.suppress(OSError):
            pressed = os.read(self._fd, 64) if self._fd is not None else b""
        if not pressed:
            self._fd = None
        return pressed.decode(errors="replace")


@contextlib.contextmanager
def open_keys(*, is_wanted: bool) -> Iterator[KeyReader]:
    """Make the terminal send keys at once and show none; restore it at the end, whatever happens."""
    try:
        fd = sys.stdin.fileno() if is_wanted and sys.stdin.isatty() else None
        is_foreground = fd is not None and os.getpgrp() == os.tcgetpgrp(fd)
    except (OSError, ValueError, AttributeError):  # closed, no descriptor, or not the terminal of this session
        fd, is_foreground = None, False
    if fd is None or not is_foreground:  # a background process must not touch its terminal
        yield KeyReader()
        return
    import termios
    import tty

    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield KeyReader(fd=fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
