"""Campaign directories with spools, for the tests of `hpcrl traj`."""

from pathlib import Path

import msgspec
import xxhash

from hpcrl.campaign_dir.checkpoints import MANIFEST_FILE, CheckpointFile, CheckpointManifest, encode_manifest
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.spool.record import Trajectory
from hpcrl.spool.segment import write_segment
from hpcrl.system.files import make_private_dir, publish_file, publish_json


def unscored(one: Trajectory) -> Trajectory:
    return msgspec.structs.replace(one, reward=None, reward_parts={})


class Spools:
    """A campaign directory that a test fills."""

    def __init__(self, root: Path) -> None:
        self.campaign = CampaignDir(root)
        self._number = 0
        for spool in ("rollouts", "scored"):
            make_private_dir(self.campaign.spool(spool))
        make_private_dir(self.campaign.job(0).root)
        (make_private_dir(self.campaign.events) / "000-driver.jsonl").touch()
        publish_json(self.campaign.recipe, {"name": "quickstart", "domains": {"lake": {}, "taxi": {}}})
        publish_json(self.campaign.site, {"name": "local"})
        publish_json(self.campaign.plan, {"layout": "local"})
        publish_json(
            self.campaign.manifest, {"name": root.name, "recipe": "quickstart", "site": "local", "created": 1.0}
        )

    def add(self, spool: str, *trajectories: Trajectory, name: str | None = None) -> Path:
        """Write a segment without a twin."""
        name = name or f"000-env-0-{self._number:08d}-{len(trajectories)}-0123abcd.h5"
        self._number += 1
        path = make_private_dir(self.campaign.spool(spool)) / name
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
        path = self.campaign.checkpoints / f"{step:06d}-step-{step:06d}" / "consumed.json"
        make_private_dir(path.parent)
        data = consumed.encode()
        publish_file(path, data)
        files = {path.name: CheckpointFile(num_bytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))}
        manifest = CheckpointManifest(step=step, version=step, created=0.0, files=files, extra={})
        publish_file(path.with_name(MANIFEST_FILE), encode_manifest(manifest))
        return path

    def keep(self, policy: str) -> None:
        publish_json(self.campaign.recipe, {"name": "quickstart", "domains": {"lake": {}}, "spool": {"keep": policy}})
