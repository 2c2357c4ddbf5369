"""Campaign directories with spools, for the tests of `hpcrl traj`."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.spool.record import EpisodeTurn, Trajectory
from hpcrl.spool.segment import write_segment
from hpcrl.system.files import make_private_dir, publish_file, publish_json
from tests.support.trajectories import make_trajectory

# Ids of the tiny tokenizer: <user> h i <agent> a b <eos> <user> ? <agent> c
TOKENS = (2, 77, 78, 3, 70, 71, 1, 2, 36, 3, 72)
GENERATED = (0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1)


def trajectory(number: int = 0, index: int = 0, *, domain: str = "lake", **changed: Any) -> Trajectory:
    """Make a trajectory of two turns: input "hi", output "ab", input "?", output "c"."""
    fields: dict[str, Any] = {
        "domain": domain,
        "seed": 7 + number,
        "created": 1_800_000_000.0 + number + index / 100,
        "start_version": number,
        "end_version": number + 1,
        "turns": [
            EpisodeTurn(start=4, end=7, reward=0.25, generate_s=0.4, step_s=0.05, remote_prefill=True),
            EpisodeTurn(start=10, end=11, reward=0.5, generate_s=0.2, step_s=0.05),
        ],
        "reset_s": 0.1,
        "reward": number / 10,
        "reward_parts": {"goal": number / 10},
        "token_ids": TOKENS,
        "logprobs": np.where(GENERATED, -0.5, 0.0),
        "versions": np.where(GENERATED, number, 0),
        "loss_mask": GENERATED,
    }
    return make_trajectory(f"{domain}/{number}/{index}", **{**fields, **changed})


def unscored(one: Trajectory) -> Trajectory:
    return msgspec.structs.replace(one, reward=None, reward_parts={})


class Spools:
    """A campaign directory that a test fills."""

    def __init__(self, root: Path) -> None:
        self.run = CampaignDir(root)
        self._number = 0
        for spool in ("rollouts", "scored"):
            make_private_dir(self.run.spool(spool))
        publish_json(self.run.recipe, {"name": "quickstart", "domains": {"lake": {}, "taxi": {}}})
        publish_json(self.run.manifest, {"name": root.name, "recipe": "quickstart", "site": "local", "created": 1.0})

    def add(self, spool: str, *trajectories: Trajectory, name: str | None = None) -> Path:
        """Write a segment without a twin."""
        name = name or f"000-env-0-{self._number:08d}-{len(trajectories)}-0123abcd.h5"
        self._number += 1
        path = make_private_dir(self.run.spool(spool)) / name
        write_segment(path, trajectories)
        return path

    def scored(self, *trajectories: Trajectory) -> Path:
        """Write a scored segment and its twin in rollouts."""
        path = self.add("scored", *trajectories)
        self.add("rollouts", *map(unscored, trajectories), name=path.name)
        return path

    def consumed(self, *groups: str, step: int = 1) -> Path:
        """Write a checkpoint in which these groups were trained on."""
        consumed = ConsumedTrajectories()
        consumed.update(f"{group}/0" for group in groups)
        path = self.run.checkpoints / f"{step:06d}-step-{step:06d}" / "consumed.json"
        make_private_dir(path.parent)
        data = consumed.encode()
        publish_file(path, data)
        content = {"num_bytes": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
        publish_json(path.with_name("checkpoint.json"), {"step": step, "files": {path.name: content}})
        return path

    def keep(self, policy: str) -> None:
        publish_json(self.run.recipe, {"name": "quickstart", "domains": {"lake": {}}, "spool": {"keep": policy}})
