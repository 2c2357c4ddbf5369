"""A lake of which one in ten cannot be made."""

from hpcrl.envs.gymnasium_text import FrozenLake


class MortalLake(FrozenLake):
    async def reset(self, seed):
        if seed % 10 == 0:
            raise ConnectionError("the lake is gone")
        return await super().reset(seed)
