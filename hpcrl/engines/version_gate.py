"""First turns that wait until an engine has the version of the weights that they need.

    VersionGate          the gate of one engine
    MAX_VERSION_WAIT_S   constant

When the trainer has made a version, env workers start episodes at once, and engines load it at the same time. An
episode whose first tokens were still of the old version would be too old when its turn in training comes, and training
would wait for its end.
"""

import asyncio
import contextlib

MAX_VERSION_WAIT_S = 30.0
"""The time after which a turn starts with whatever version there is: an engine that cannot load one continues."""


class VersionGate:
    """The gate of one engine, which opens for a version once that is loaded."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._opened = asyncio.Event()

    def open_for(self, version: int) -> None:
        """Let turns pass that need this version, or an older one."""
        self._version = version
        self._opened.set()
        self._opened = asyncio.Event()

    async def pass_through(self, version: int) -> None:
        """Wait until the engine has a version, MAX_VERSION_WAIT_S at most."""
        if version <= self._version:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_VERSION_WAIT_S):
                while version > self._version:
                    await self._opened.wait()
