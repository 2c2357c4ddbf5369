"""One campaign on the lab with every unmodified agent as a domain; one training step takes a group of each.

The model is tiny and generates nonsense; calls and JSON that an agent requires are held to their form by the grammar.
`make test-agents` installs the agents and runs this module; one that is not installed is skipped.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.envs.isolation.sandbox import choose_sandbox
from hpcrl.errors import EnvFault
from hpcrl.lab import lab as labs
from hpcrl.learn.consumed import read_consumed_groups
from hpcrl.spool.token_fates import explain_untrained
from hpcrl.testing.event_lines import read_events
from tests.support.agent_recipe import AGENTS, find_missing, write_recipe
from tests.support.campaigns import end_campaigns, hpcrl, steps
from tests.support.lab_tools import running_lab

pytestmark = [pytest.mark.agents, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class PlayedCampaign:
    """The campaign when it is done."""

    figures: dict[str, Any]
    """What `hpcrl traj stats` prints, by domain."""
    faults: dict[str, list[str]]
    """The texts of the faults of each domain."""
    step: dict[str, Any]
    """The event of the training step."""
    trained_domains: set[str]
    """The domains of the groups that the checkpoint has trained on."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedCampaign]:
    """Play the campaign of all agents that are installed."""
    if missing := labs.find_missing_commands():
        pytest.skip(f"the lab needs {', '.join(missing)}: apt-get install {labs.APT_PACKAGES}")
    installed = [name for name in AGENTS if not find_missing(name)]
    if not installed:
        pytest.skip(f"no agent is installed; {find_missing('openai')}")
    folder = tmp_path_factory.mktemp("agents")
    try:
        sandbox = choose_sandbox("auto", image=None)
    except EnvFault:
        sandbox = "none"
    write_recipe(folder / "agents.toml", installed, sandbox=sandbox)
    with running_lab() as lab, pytest.MonkeyPatch.context() as patch:
        for name, value in {**labs.make_environment(lab.state_dir), "HPCRL_LAB": str(lab.state_dir)}.items():
            patch.setenv(name, value)
        patch.setenv("HPCRL_HOME", str(folder / "home"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        try:
            hpcrl("submit", str(folder / "agents.toml"), "--site", "lab", "--watch", "--name", "a", timeout_s=3000)
            yield read_campaign(CampaignDir(folder / "home" / "campaigns" / "a"))
        finally:
            end_campaigns(folder / "home")


def read_campaign(campaign: CampaignDir) -> PlayedCampaign:
    stats = json.loads(hpcrl("traj", "stats", campaign.name, "--json").stdout)
    (step,) = steps(campaign)
    faults: dict[str, list[str]] = {}
    for event in read_events(campaign.events):
        if event["event"] == "fault" and event["what"] != "request":  # which shows how a request was served
            faults.setdefault(event.get("domain", ""), []).append(f"{event['what']}: {event.get('detail')}")
    return PlayedCampaign(
        figures={figures["domain"]: figures for figures in stats["domains"]},
        faults=faults,
        step=step,
        trained_domains=set(read_consumed_groups(campaign.checkpoints).number_ranges),
    )


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> str:
    """An agent that is installed."""
    if missing := find_missing(request.param):
        pytest.skip(missing)
    name: str = request.param
    return name


def test_every_token_that_the_model_generated_for_an_agent_was_trained(agent: str, played: PlayedCampaign) -> None:
    assert played.faults.get(agent, []) == []
    figures = played.figures[agent]
    assert set(figures["by_status"]) <= {"done", "truncated"}, figures["by_status"]
    assert figures["num_trajectories"] >= 2
    # The model is random: where the length limit cuts its call off, some agents end after that turn.
    assert figures["turns"]["max"] >= AGENTS[agent].min_turns
    assert figures["num_generated_tokens"] > 0
    assert figures["trained_share"] == 1.0, explain_untrained(figures["token_fates"])
    assert agent in played.trained_domains


def test_the_step_on_a_group_of_every_agent_moves_the_weights(played: PlayedCampaign) -> None:
    assert played.step["skipped"] is None
    assert played.step["num_groups"] == len(played.figures)
    assert played.step["num_flat_groups"] < played.step["num_groups"]
    assert played.step["grad_norm"] > 0
