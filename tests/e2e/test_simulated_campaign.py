"""A campaign with simulated engines: versions, KV transfers and routing are those of a real one."""

from pathlib import Path
from typing import Any

import pytest

from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.rollout.routing.role_switch import read_switched_roles
from hpcrl.spool.record import EpisodeTurn
from hpcrl.spool.segment import read_segment
from hpcrl.weights.versions import find_newest_manifest
from tests.support.campaigns import SMALL, events_of, hpcrl, steps, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RECIPE = """
name = "simulated"
extends = "quickstart"

[domains.lake]
max_turns = 3

[domains.pond]
env = "hpcrl.envs.gymnasium_text:FrozenLake"
reward = "hpcrl.envs.gymnasium_text:goal_and_way"
max_turns = 2
max_new_tokens = 4

[train]
lora_rank = 4
publish_lora = "adapters"

[engine]
backend = "sim"

[engine.sim]
gpu = ["h100", "h20"] # workers with an even number compute faster, those with an odd one read memory faster
speed = 0.02

[router]
log_share = 1
mismatch_penalty = 1000 # never on the other hardware

[router.affinity]
lake = "compute"
pond = "bandwidth"

[resources.prefill]
num_workers = 2

[resources.decode]
num_workers = 2
"""
FAST = {"lake": "-0", "pond": "-1"}
"""Suffix of the workers that have the hardware of each domain."""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "simulated.toml"
    path.write_text(RECIPE)
    return str(path)


def test_turns_and_their_kv_go_to_the_hardware_of_their_domain_and_a_worker_switches_roles(
    campaigns: Path, recipe: str
) -> None:
    """These turns have prompts of a few tokens: one prefill worker is enough, and decode lacks one."""
    sizing = ("-s", "router.remote_prefill=always", "-s", "router.sizing=auto")
    endless = ("-s", "train.num_steps=100000", "-s", "rollout.max_running=16")
    hpcrl("submit", recipe, "--site", "local", "--name", "flip", *SMALL, *sizing, *endless)
    campaign = CampaignDir(campaigns / "flip")
    until(lambda: all(_is_at_home(campaign, domain) for domain in FAST), what=f"domains are served by {FAST}")
    until(
        lambda: "decode" in read_switched_roles(campaign.switched_roles).values(),
        what="a worker has switched roles",
        timeout_s=300,
    )
    (changed,) = read_switched_roles(campaign.switched_roles)
    assert "-prefill-" in changed
    until(lambda: any(route["decode"] == changed for route in routes(campaign)), what=f"{changed} decodes")
    hpcrl("stop", "--now", "flip")
    assert {step["num_trajectories"] for step in steps(campaign)} == {8}
    assert any(turn.remote_prefill for turn in turns(campaign))
    assert any("-prefill-" in (route["prefill"] or "") for route in routes(campaign))
    newest = {event["role"]: event["version"] for event in events_of(campaign, "loaded")}
    assert set(newest) == {"prefill", "decode"}
    assert max(newest.values()) >= 1
    first = find_newest_manifest(campaign.weights)
    assert first is not None
    assert {name.split(".")[-2] for name in first.checksums} == {"lora_A", "lora_B"}, "versions are adapters alone"


def routes(campaign: CampaignDir) -> list[dict[str, Any]]:
    return events_of(campaign, "route")


def turns(campaign: CampaignDir) -> list[EpisodeTurn]:
    segments = [path for spool in SPOOLS for path in campaign.spool(spool).glob("*.h5")]
    return [turn for path in segments for facts in read_segment(path).facts for turn in facts.turns]


def _is_at_home(campaign: CampaignDir, domain: str) -> bool:
    """Check that the domain's last 50 turns were all on its hardware, as they are once that is ready."""
    last = [route["decode"] or "" for route in routes(campaign) if route["domain"] == domain][-50:]
    return len(last) == 50 and all(worker.endswith(FAST[domain]) for worker in last)
