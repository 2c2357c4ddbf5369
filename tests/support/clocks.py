"""Clocks for tests: one for code that is given a clock, one that jumps under real processes."""

import shutil
import subprocess
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).with_name("jumping_clock.c")


class SettableClock:
    """A clock that stands still until its time is set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class JumpingClock:
    """The time of day of processes that are started with its environment; the monotonic clock is the machine's."""

    def __init__(self, library: Path) -> None:
        self._jump = library.with_name("jump")
        self.environ = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._jump)}

    @classmethod
    def build(cls, directory: Path) -> Self | None:
        """Compile the library into a directory; None without a C compiler."""
        if (compiler := shutil.which("cc")) is None:
            return None
        library = directory / "jumping_clock.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        return cls(library)

    def set_ahead(self, seconds: int) -> None:
        """Let the time be that many seconds ahead of the machine's, or behind it."""
        partial = self._jump.with_name(".jump")
        partial.write_text(str(seconds))
        partial.rename(self._jump)
