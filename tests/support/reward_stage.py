"""Reward workers in a campaign, without a model.

RewardStage   a reward worker and its sessions
finish        receive all that a session has under way
"""

import os

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.roles import reward
from hpcrl.roles.reward import RepeatedFaults, ScoringSession
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.spool.segment import read_segment, write_segment
from hpcrl.system.files import make_private_dir, publish_json
from tests.support.campaign_spools import unscored
from tests.support.plans import make_reward_recipe
from tests.support.trajectories import make_lake_trajectory
from tests.support.workers import make_worker_context

NUM = 4


class RewardStage:
    """A reward worker in a campaign, and the sessions that it runs."""

    def __init__(self, root, *, teacher=""):
        self.campaign = CampaignDir(root)
        for directory in (self.campaign.spool("rollouts"), self.campaign.spool("scored"), self.campaign.events):
            make_private_dir(directory)
        self.faults = None
        self.process = RewardProcess(root, concurrency=8, num_cpus=os.cpu_count(), teacher=teacher)

    def open(self, function, *, settings=(), **options):
        timeout = "domains.lake.reward_timeout_s=0.5"
        recipe = make_reward_recipe(f"many_rewards:{function}", timeout, *settings, **options)
        publish_json(self.campaign.recipe, msgspec.to_builtins(recipe))
        context = make_worker_context(self.campaign, "reward", recipe)
        self.faults = self.faults or RepeatedFaults(context.events.emit)
        return ScoringSession(context, self.process, self.faults)

    def add(self, name, *, outcomes=("",) * NUM):
        trajectories = [
            msgspec.structs.replace(unscored(make_lake_trajectory(0, index)), outcome=outcome)
            for index, outcome in enumerate(outcomes)
        ]
        write_segment(self.campaign.spool("rollouts") / name, trajectories)

    def twin(self, name):
        return list(read_segment(self.campaign.spool("scored") / name))

    def open_task(self, monkeypatch, function, *, placement="spare", **options):
        """Return a function that runs tasks of one worker; each takes segments for no longer than it must."""
        context = self.open(function, settings=(f"reward.placement={placement}",), **options)._context
        for name, value in (("context", context), ("process", self.process)):
            monkeypatch.setattr(reward, f"_open_reward_{name}", lambda *_, value=value: value)
        monkeypatch.setattr(reward, "_open_faults", lambda *_: self.faults)
        monkeypatch.setattr(reward, "_open_reward_listener", lambda *_: None)
        monkeypatch.setattr(reward, "MAX_SESSION_S", 0.0)
        monkeypatch.setattr(reward, "MAX_IDLE_S", 0.0)
        monkeypatch.setattr(reward, "MAX_LINGER_S", 0.0 if placement == "elastic" else reward.MAX_LINGER_S)
        return lambda *segments: reward.score(str(self.campaign.root), 0, list(segments), 0, 1)


def finish(session):
    while session.under_way:
        session.receive()
