"""Role prefill: computes the KV of prompts and hands it to decode workers."""

import asyncio

from hpcrl.roles.context import Context
from hpcrl.roles.serving import serve_engine


def run(context: Context) -> None:
    """Serve until the job ends."""
    asyncio.run(serve_engine(context))
