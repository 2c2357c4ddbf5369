"""Role decode: generates tokens, from KV that prefill workers hand over or from its own prefill."""

import asyncio

from hpcrl.roles.context import Context
from hpcrl.roles.serving import serve_engine


def run(context: Context) -> None:
    """Serve until the job ends."""
    asyncio.run(serve_engine(context))
