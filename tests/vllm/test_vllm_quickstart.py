"""The shipped recipe with vLLM, as the README prints it."""

from pathlib import Path

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import end_campaigns, events_of, hpcrl, steps
from tests.support.printed_commands import ROOT, VLLM_LINE


def test_the_recipe_learns_as_printed(home: Path) -> None:
    program, *words = VLLM_LINE.split()
    assert program == ".venv/bin/hpcrl"
    try:
        printed = hpcrl(*(str(ROOT / word) if word.endswith(".toml") else word for word in words)).stdout
    finally:
        end_campaigns(home)
    campaign = CampaignDir(home / "campaigns" / "quickstart-vllm-1")
    rewards = [step["reward_mean"] for step in steps(campaign)]
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    assert {event["role"] for event in events_of(campaign, "loaded")} >= {"decode"}
    assert "campaign quickstart-vllm-1 is done: mean reward" in printed
