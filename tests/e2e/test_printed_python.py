"""The Python that pages show, in one campaign: an environment, a reward by a judge, a curriculum, a loss, an update."""

import os
from collections import defaultdict
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import SIMULATED, events_of, hpcrl, outcome
from tests.support.doc_blocks import TUTORIAL, find_blocks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
DOCS = TUTORIAL.parent
PAGES = ("environments", "learning", "recipes")
RECIPE = """
name = "pages"
extends = "quickstart"

[rollout]
curriculum = "my_curriculum:hardest_first"

[domains.questions]
env = "played:PlayedQuestion"
tasks = "questions.jsonl"
judges = ["grader"]
reward = "my_grades:reward"

[judge.grader.tiny]
hidden_size = 64

[train.pipeline.loss]
function = "my_package.losses:loss"

[train.pipeline.update]
function = "my_package.losses:momentum"
"""
PLAYED = """
from hpcrl.envs.base import Step
from my_questions import Question


class PlayedQuestion(Question):
    def step(self, action):
        return Step(observation="", reward=float(action == self.answer), done=True)

    def close(self): ...
"""


EAGER = """

from hpcrl.rollout import curriculum

curriculum.UPDATE_INTERVAL_S = 0.5  # the whole campaign may take less than the usual one
"""
TRACED = """
import functools
from pathlib import Path


def trace(function):
    @functools.wraps(function)
    def call(*arguments):
        Path(__file__).with_name(f"{function.__name__}.called").touch()
        return function(*arguments)

    return call


loss, momentum = trace(loss), trace(momentum)
"""


def find_modules() -> dict[str, str]:
    """Return the modules that the pages show by path, which the first line of a block has."""
    modules: defaultdict[str, str] = defaultdict(str)
    for page in PAGES:
        for block in find_blocks(DOCS / f"{page}.md", "python"):
            name, _, text = block.text.partition("\n")
            modules[name.removeprefix("# ")] += text + "\n"
    return modules


def test_the_python_of_pages_trains_a_campaign(
    campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = "".join(f'{{"question": "{number}+1=?", "answer": "{number + 1}"}}\n' for number in range(9))
    added = {"my_package/losses.py": TRACED, "my_curriculum.py": EAGER}
    modules = {name: text + added.get(name, "") for name, text in find_modules().items()}
    files = modules | {"pages.toml": RECIPE, "played.py": PLAYED, "questions.jsonl": questions}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, Path(__file__).parents[2]))))
    hpcrl("submit", str(tmp_path / "pages.toml"), "--site", "local", "--watch", *SIMULATED, "-s", "train.num_steps=40")
    campaign = CampaignDir(campaigns / "pages-1")
    assert outcome(campaign)["outcome"] == "done"
    assert not outcome(campaign).get("untrained")
    assert events_of(campaign, "fault") == []
    grades = [grade for event in events_of(campaign, "scored") for grade in event["rewards"].get("questions", ())]
    assert set(grades) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert len(set(grades)) > 1, "the judge has graded"
    assert {path.name for path in (tmp_path / "my_package").glob("*.called")} == {"loss.called", "momentum.called"}
    assert {len(event["weights"]) for event in events_of(campaign, "curriculum")} == {2}
