"""A lake on which every move takes a while."""

import asyncio

from hpcrl.envs.gymnasium_text import FrozenLake


class SlowLake(FrozenLake):
    async def step(self, action):
        await asyncio.sleep(0.5)
        return await super().step(action)
