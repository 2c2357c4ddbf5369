"""Trajectories of a campaign as the data of a warm-up: which are chosen, with which tokens, and what is refused."""

import json
import shutil

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import TinyModel, WarmupConfig
from hpcrl.envs.task_set import WARMUP_ROWS, ImitationModel, TaskRows, check_conversations, import_conversations
from hpcrl.errors import ConfigError
from hpcrl.models.tiny import make_tiny_model
from hpcrl.roles.warmup import restore_trajectory
from hpcrl.spool.record import ConversationRow, EpisodeTurn
from hpcrl.spool.rows import expand_row
from hpcrl.system.files import publish_json
from hpcrl.traj import imitation
from tests.support.campaign_spools import Spools, unscored
from tests.support.trajectories import GENERATED, TOKENS, make_lake_trajectory


@pytest.fixture
def spools(tmp_path):
    made = Spools(tmp_path / "source")
    publish_json(made.campaign.recipe, {"name": "quickstart", "model": {"tiny": {}}})
    return made


def read_rows(campaign: CampaignDir, capfdbinary, monkeypatch, *, model=None, min_reward=None):
    """Return the rows that the reading process prints, or what it refuses."""
    request = {"root": str(campaign.root), "model": model, "min_reward": min_reward}
    monkeypatch.setattr("sys.argv", ["imitation", json.dumps(request)])
    code = imitation.main()
    out, err = capfdbinary.readouterr()
    assert code == (2 if err else 0)
    return err.decode() or [json.loads(line) for line in out.splitlines()]


def test_the_scored_trajectories_with_enough_reward_are_copied_with_their_tokens(spools, tmp_path):
    spools.scored(*(make_lake_trajectory(number) for number in range(4)))  # rewards 0, 0.1, 0.2, 0.3
    spools.add("archive", make_lake_trajectory(9), make_lake_trajectory(8, status="env-fault"))
    spools.add("rollouts", unscored(make_lake_trajectory(7)))
    warmup = WarmupConfig(path=str(spools.campaign.root), steps=1, min_reward=0.2)
    import_conversations(warmup, directory=tmp_path)
    shutil.rmtree(spools.campaign.root)  # the copy is all that training needs
    rows = TaskRows(tmp_path, domain=WARMUP_ROWS, split="train")
    assert len(rows) == 3
    made = restore_trajectory(rows.read_row(0), name="warmup/0", domain="warmup")
    assert made.token_ids.tolist() == list(TOKENS)
    assert made.loss_mask.tolist() == list(map(bool, GENERATED))
    assert made.reward == 1


def test_conversations_of_an_episode_keep_what_they_share(spools, capfdbinary, monkeypatch):
    branches = [ConversationRow(end=7), ConversationRow(end=11, parent=0, shares=4)]
    turns = [EpisodeTurn(start=4, end=7), EpisodeTurn(start=10, end=11, row=1, masked="choice")]
    mask = [*GENERATED[:7], 0, 0, 0, 0]
    recorded = make_lake_trajectory(1, turns=turns, rows=branches, loss_mask=mask)
    spools.scored(recorded)
    (fields,) = read_rows(spools.campaign, capfdbinary, monkeypatch)
    made = restore_trajectory(fields, name="warmup/0", domain="warmup")
    for row in range(2):
        ours, theirs = expand_row(made, row), expand_row(recorded, row)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()


def test_a_campaign_without_enough_reward_is_refused(spools):
    spools.scored(make_lake_trajectory(1))
    warmup = WarmupConfig(path=str(spools.campaign.root), steps=1, min_reward=0.5)
    with pytest.raises(ConfigError, match=r"no trajectory with a reward of 0\.5 or more among the 1 that are scored"):
        check_conversations(warmup, model=ImitationModel())


def test_a_least_reward_of_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"min_reward = 1 is for the trajectories of a campaign"):
        check_conversations(WarmupConfig(path=str(tmp_path / "x.jsonl"), steps=1, min_reward=1))


def test_a_campaign_whose_tokens_mean_something_else_is_refused(spools, tmp_path, capfdbinary, monkeypatch):
    spools.scored(make_lake_trajectory(1))
    other = tmp_path / "other"
    make_tiny_model(other, TinyModel(), seed=0)
    refusal = read_rows(spools.campaign, capfdbinary, monkeypatch, model=str(other))
    assert "its model is a tiny one and this model is not" in refusal
    publish_json(spools.campaign.recipe, {"name": "quickstart", "model": {"path": "/models/x"}})
    shutil.copytree(other, spools.campaign.model)
    assert len(read_rows(spools.campaign, capfdbinary, monkeypatch, model=str(other))) == 1
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refusal = read_rows(spools.campaign, capfdbinary, monkeypatch, model=str(other))
    assert "another vocabulary" in refusal
    assert "'a' is" in refusal


def test_a_segment_that_cannot_be_read_is_refused_and_not_left_out(spools, capfdbinary, monkeypatch):
    path = spools.scored(make_lake_trajectory(1))
    path.write_bytes(path.read_bytes()[:200])
    assert "a segment cannot be read" in read_rows(spools.campaign, capfdbinary, monkeypatch)
