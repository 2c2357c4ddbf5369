"""Rewards in processes that can be killed: many at a time, and what hangs, dies or returns nonsense costs itself."""

import os
import signal
import time

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import RewardError
from hpcrl.models.tiny import make_tiny_model
from hpcrl.rollout.judge_outages import JudgeOutages
from hpcrl.rollout.judges import proxy
from hpcrl.rollout.judges.proxy import JudgeProxy
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.spool.segment import write_segment
from hpcrl.system.files import publish_file
from hpcrl.system.processes import list_descendants
from tests.support.plans import make_recipe, make_reward_recipe
from tests.support.served_judges import judge_host
from tests.support.trajectories import make_lake_trajectory

NUM = 8


class Scoring:
    """A campaign directory, and the process that scores its segments."""

    def __init__(self, root):
        self.campaign = CampaignDir(root)
        self.process = None
        self._others = set(list_descendants())
        """Processes of other tests, such as a fork server."""

    def start(self, function, *, timeout_s=30.0, concurrency=NUM, judges=(), **options):
        reward = f"{'judged' if judges else 'many'}_rewards:{function}"
        recipe = make_reward_recipe(reward, f"domains.lake.reward_timeout_s={timeout_s}", judges=judges, **options)
        self.start_recipe(recipe, concurrency)

    def start_recipe(self, recipe, concurrency):
        publish_file(self.campaign.recipe, msgspec.json.encode(recipe))
        self.process = RewardProcess(self.campaign.root, concurrency=concurrency, num_cpus=os.cpu_count())

    def request(self, *trajectories, name="a.h5"):
        path = self.campaign.root / name
        write_segment(path, trajectories or [make_lake_trajectory(0, index) for index in range(NUM)])
        self.process.request(path)

    def pids(self):
        """Return the scoring process and the processes below it."""
        return [pid for pid in list_descendants() if pid not in self._others]

    def rewards(self):
        """Return the reward or the reason of each trajectory of the next segment."""
        answer = self.process.receive(60.0)
        assert not answer.error
        return [score and (score.error or sum(score.parts.values())) for score in answer.scores]


@pytest.fixture
def scoring(tmp_path):
    scoring = Scoring(tmp_path)
    yield scoring
    scoring.process.close()


@pytest.mark.parametrize("function", ["block_together", "wait_together"])
def test_rewards_of_a_segment_are_computed_at_the_same_time(scoring, tmp_path, function):
    (tmp_path / "calls").mkdir()
    scoring.start(function, directory=str(tmp_path / "calls"), num=NUM)
    scoring.request()
    assert scoring.rewards() == list(range(NUM))


@pytest.mark.parametrize("function", ["block_together", "wait_together"])
def test_rewards_of_two_segments_are_computed_at_the_same_time(scoring, tmp_path, function):
    (tmp_path / "calls").mkdir()
    scoring.start(function, directory=str(tmp_path / "calls"), num=4)
    scoring.request(make_lake_trajectory(0, 0), make_lake_trajectory(0, 1), name="a.h5")
    scoring.request(make_lake_trajectory(1, 2), make_lake_trajectory(1, 3), name="b.h5")
    assert sorted([scoring.rewards(), scoring.rewards()]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("function", ["hang_for", "wait_for"])
def test_a_reward_that_hangs_costs_its_trajectory(scoring, function):
    scoring.start(function, timeout_s=0.5, index=3)
    scoring.request()
    rewards = scoring.rewards()
    assert "longer than reward_timeout_s = 0.5 s" in rewards.pop(3)
    assert rewards == [0, 1, 2, 4, 5, 6, 7]


def test_a_list_that_hangs_is_repeated_one_by_one(scoring):
    scoring.start("of_a_list_with", timeout_s=2, index=3, fault="hang")
    scoring.request()
    rewards = scoring.rewards()
    assert "longer than reward_timeout_s = 2 s" in rewards.pop(3)
    assert rewards == [0, 1, 2, 4, 5, 6, 7]


def test_a_reward_that_ends_its_process_costs_its_trajectory(scoring):
    scoring.start("die_for", index=3)
    scoring.request()
    rewards = scoring.rewards()
    assert rewards.pop(3) == "its process was killed by SIGKILL"
    assert rewards == [0, 1, 2, 4, 5, 6, 7]


def test_a_list_is_scored_by_one_call_with_texts(scoring, model):
    (scoring.campaign.root / "model").symlink_to(model)
    scoring.start("of_all")
    scoring.request()
    assert scoring.rewards() == [index + NUM / 100 + 1 for index in range(NUM)]


@pytest.mark.parametrize(("fault", "reason"), [("raise", "LookupError: not this one"), ("value", "finite")])
def test_a_list_that_fails_is_repeated_one_by_one(scoring, fault, reason):
    scoring.start("of_a_list_with", index=3, fault=fault)
    scoring.request()
    rewards = scoring.rewards()
    assert reason in rewards.pop(3)
    assert rewards == [0, 1, 2, 4, 5, 6, 7]


def test_a_wrong_number_of_rewards_is_the_error_of_each(scoring):
    """A function that returns one number for a whole list must not pass because it would be right for a list of one."""
    scoring.start("mean_of_list")
    scoring.request()
    assert all("for 8 trajectories: return a list" in reason for reason in scoring.rewards())


def test_a_segment_that_is_requested_again_meanwhile_is_scored_once(scoring, tmp_path):
    (tmp_path / "calls").mkdir()
    scoring.start("note", directory=str(tmp_path / "calls"))
    scoring.request()
    scoring.process.request(scoring.campaign.root / "a.h5")
    scoring.request(name="b.h5")
    assert [scoring.rewards(), scoring.rewards()] == [list(range(NUM))] * 2
    assert len(list((tmp_path / "calls").iterdir())) == 2 * NUM


def test_domains_take_turns(scoring, tmp_path):
    (tmp_path / "calls").mkdir()
    recipe = make_reward_recipe("many_rewards:note", directory=str(tmp_path / "calls"))
    scoring.start_recipe(
        msgspec.structs.replace(recipe, domains={"a": recipe.domains["lake"], "b": recipe.domains["lake"]}), 1
    )
    scoring.request(*[make_lake_trajectory(0, index, domain="a" if index < 3 else "b") for index in range(6)])
    assert scoring.rewards() == [0, 1, 2, 3, 4, 5]
    calls = [path.name.split("-") for path in (tmp_path / "calls").iterdir()]
    assert [int(index) for index, _ in sorted(calls, key=lambda call: int(call[1]))] == [0, 3, 1, 4, 2, 5]


@pytest.fixture
def judges(scoring, tiny_model_dir, tmp_path, monkeypatch):
    """Return the host of the judge "grader", whose proxy is open and whose engine is not up."""
    monkeypatch.setattr(proxy, "PROBE_INTERVAL_S", 0.02)
    with judge_host(tiny_model_dir, tmp_path / "endpoints") as host, JudgeProxy({"grader": host.directory}, job=0):
        yield host
        scoring.process.close()


def test_rewards_wait_for_a_judge_that_is_not_up_yet(scoring, judges):
    scoring.start("ask_judge", judges=["grader"])
    scoring.request(make_lake_trajectory(0, 0), make_lake_trajectory(0, 1))
    assert scoring.process.receive(0.3) is None
    judges.start()
    assert scoring.rewards() == [0.0, 1.0]


def test_a_reward_whose_judge_is_gone_is_computed_again_when_it_is_back(scoring, judges, monkeypatch):
    monkeypatch.setattr(proxy, "CALL_HOLD_TIMEOUT_S", 0.0)  # so that the function sees the outage, as an error
    judges.start()
    scoring.start("ask_judge", judges=["grader"])
    scoring.request(make_lake_trajectory(0, 0))
    assert scoring.rewards() == [0.0]
    judges.end()
    JudgeOutages.from_environment().mark_back("grader")  # the calls start before anyone knows that it is gone
    scoring.request(make_lake_trajectory(0, 1), name="b.h5")
    assert scoring.process.receive(0.5) is None
    judges.start()
    assert scoring.rewards() == [1.0]


def test_a_reward_that_fails_whenever_its_judge_does_is_a_fault_in_the_end(scoring, judges, monkeypatch):
    judges.start()
    scoring.start("raise_after_outage", judges=["grader"])
    scoring.request(make_lake_trajectory(0, 0))
    (score,) = scoring.process.receive(60.0).scores
    assert score.is_infrastructure
    assert "not this one; a judge failed or was gone, 4 times" in score.error


def test_what_a_judge_refuses_is_the_error_of_the_reward(scoring, judges):
    judges.start()
    scoring.start("ask_impossible", judges=["grader"])
    scoring.request(make_lake_trajectory(0, 0))
    (score,) = scoring.process.receive(60.0).scores
    assert not score.is_infrastructure
    assert "BadRequestError" in score.error


def test_what_is_not_a_reward_is_an_error_of_its_trajectory(scoring):
    values = ["nan", "inf", "0.5", "none", "huge", [1.0], True, "parts"]
    scoring.start("odd", values=values)
    scoring.request()
    rewards = scoring.rewards()
    assert rewards[6:] == [1.0, 3.5]
    assert all(reason.startswith("it returned") for reason in rewards[:6])


def test_what_cannot_be_trained_is_not_scored(scoring, tmp_path):
    (tmp_path / "calls").mkdir()
    scoring.start("note", directory=str(tmp_path / "calls"))
    scoring.request(make_lake_trajectory(0, 0, status="env-fault", reward=None), make_lake_trajectory(0, 1))
    assert scoring.rewards() == [None, 1.0]
    assert len(list((tmp_path / "calls").iterdir())) == 1


def test_a_process_that_is_killed_is_reported(scoring):
    scoring.start("wait_for", index=0)
    scoring.request()
    while len(below := scoring.pids()) < 2:
        time.sleep(0.01)
    os.kill(min(below), signal.SIGKILL)
    with pytest.raises(RewardError, match="code -9"):
        scoring.process.receive(60.0)
    scoring.request(name="b.h5")
    assert scoring.process.receive(0.0) is None


def test_no_process_is_left_when_the_worker_closes_it(scoring):
    scoring.start("hang_for", index=0)
    scoring.request()
    while len(scoring.pids()) < 3:
        time.sleep(0.01)
    scoring.process.close()
    assert scoring.pids() == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory, make_recipe().model.tiny, seed=0)
    return directory
