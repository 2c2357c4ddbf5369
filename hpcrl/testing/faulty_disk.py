"""A file system that fails on command under real processes: a library is preloaded that makes their calls fail.

FaultyDisk   the library, and the switches by which calls below a folder return errors, lag or hang
"""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).with_name("faulty_disk.c")


class FaultyDisk:
    """The preloaded library, and the switches of a folder whose calls it makes fail."""

    def __init__(self, folder: Path, *, library: Path, switch: Path) -> None:
        self._switch = switch
        self.environ = {
            "LD_PRELOAD": str(library),
            "HPCRL_TEST_FAULTY_FOLDER": str(folder),
            "HPCRL_TEST_FAULTY_SWITCH": str(switch),
        }
        """The variables of processes that are to meet its faults."""

    @classmethod
    def build(cls, folder: Path, *, directory: Path) -> Self | None:
        """Compile the library into a directory outside the folder; None without a C compiler."""
        if (compiler := shutil.which("cc")) is None:
            return None
        library = directory / "faulty_disk.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        return cls(folder, library=library, switch=directory / "faults")

    @contextlib.contextmanager
    def fail_calls(self, error: int, *, kinds: str = "rw", lag_ms: int = 0, where: str = "") -> Iterator[None]:
        """Make calls that read (r) or change something (w) fail for the length of a block; -1 ms: they hang.

        `where` is one node of a lab, or one process; the default is everywhere.
        """
        switch = self._switch.with_name(f"{self._switch.name}.{where}") if where else self._switch
        partial = switch.with_name(f".{switch.name}")
        partial.write_text(f"{error} {kinds} {lag_ms}")
        partial.rename(switch)
        try:
            yield
        finally:
            switch.unlink()
