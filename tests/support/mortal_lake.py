"""A lake that cannot be made now and then."""

import random

from hpcrl.envs.gymnasium_text import FrozenLake

_DRAWS = random.Random(0)


class MortalLake(FrozenLake):
    """Two resets in five fail; three in a row, as often as an episode is tried, are rare."""

    async def reset(self, seed):
        if _DRAWS.random() < 0.4:
            raise ConnectionError("the lake is gone")
        return await super().reset(seed)
