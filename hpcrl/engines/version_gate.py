"""First turns that wait until an engine has the version of the weights that they need.

    VersionGate          the gate of one engine
    MAX_VERSION_WAIT_S   constant

When the trainer has made a version, env workers start episodes at once, and engines load it at the same time. An
episode whose first tokens were still of the old version would be too old when its turn in training comes, and training
would wait for its end.
"""

import asyncio

MAX_VERSION_WAIT_S = 10.0
"""The time after which a turn starts with whatever version there is: an engine that cannot load one continues.

Routers wait for twice as long for a prompt.
"""


class VersionGate:
    """The gate of one engine, which opens for a version once that is loaded."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._opened = asyncio.Event()
        self.num_waiting = 0
        """Turns that wait now."""

    def open_for(self, version: int) -> None:
        """Let turns pass that need this version, or an older one."""
        self._version = version
        self._opened.set()
        self._opened = asyncio.Event()

    async def pass_through(self, version: int) -> None:
        """Wait until the engine has a version, MAX_VERSION_WAIT_S at most."""
        if version <= self._version:
            return
        self.num_waiting += 1
        try:
            async with asyncio.timeout(MAX_VERSION_WAIT_S):
                while version > self._version:
                    await self._opened.wait()
        except TimeoutError:
            return
        finally:
            self.num_waiting -= 1
