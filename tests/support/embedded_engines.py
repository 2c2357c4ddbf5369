"""Embedded engines for the length of a test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hpcrl.engines.embedded.engine import EmbeddedEngine


def on(engine: EmbeddedEngine, body: Callable[[], Awaitable[Any]]) -> Any:
    """Return what `body` does while an engine runs."""

    async def run() -> Any:
        async with engine:
            return await body()

    return asyncio.run(run())
