"""A whole campaign whose environment is a program written with the `openai` package."""

from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.envs.isolation.sandbox import choose_sandbox
from hpcrl.errors import EnvFault
from tests.support.campaigns import hpcrl, processes_of, snapshot, steps, until

pytest.importorskip("openai")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_campaign_trains_on_what_an_agent_program_did(home: Path) -> None:
    try:
        sandbox = choose_sandbox("auto", image=None)
    except EnvFault:
        sandbox = "none"
    few = ("-s", "train.num_steps=2", "-s", "train.groups_per_step=1", "-s", "rollout.max_running=4")
    settings = (*few, "-s", f"domains.sums.options.sandbox={sandbox}")
    hpcrl("submit", "agent", "--site", "local", "--watch", "--name", "a", *settings, timeout_s=800)
    seen = snapshot("a")
    assert (seen["state"], seen["step"]) == ("done", 2)
    assert len(steps(CampaignDir(home / "campaigns" / "a"))) == 2
    until(lambda: not processes_of(home), what=f"no process is left: {processes_of(home)}", timeout_s=60)
