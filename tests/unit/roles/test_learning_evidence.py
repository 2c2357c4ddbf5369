"""The end of a campaign that learned nothing: a failure with the reason."""

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_progress import read_train_progress
from hpcrl.config.recipe import WarmupConfig
from hpcrl.envs.task_set import import_conversations
from hpcrl.errors import TrainError
from hpcrl.models.tiny import make_tiny_model
from hpcrl.roles.learning_evidence import LearningEvidence
from hpcrl.roles.train import _open_warmup, _run_leader
from hpcrl.spool.outcome import OUTCOME_REWARD_ERROR, OUTCOME_TIMEOUT
from hpcrl.system.files import make_private_dir
from hpcrl.trainers.torch import TorchTrainer
from tests.support.chats import make_chat
from tests.support.plans import make_recipe
from tests.support.trajectories import make_trajectory
from tests.support.workers import make_worker_context


def make_imitation_context(tmp_path, rows, *settings):
    """Make a campaign that imitates these rows and nothing else, as its trainer sees it."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    recipe = make_recipe("train.checkpoint_every_steps=1", *settings, name="sft")
    warmup = WarmupConfig(path=str(path), steps=3, conversations_per_step=2)
    train = msgspec.structs.replace(recipe.train, num_steps=3)
    recipe = msgspec.structs.replace(recipe, warmup=warmup, train=train)
    campaign = CampaignDir(tmp_path / "campaign")
    make_private_dir(campaign.events)
    campaign.warmup.mkdir(parents=True)
    import_conversations(warmup, directory=campaign.warmup)
    make_tiny_model(campaign.model, recipe.model.tiny, seed=0)
    return make_worker_context(campaign, "train", recipe)


def imitate(context):
    trainer = TorchTrainer(context.campaign.model, context.recipe.train)
    return _run_leader(context, trainer, _open_warmup(context), None)


def test_a_warm_up_of_which_no_conversation_fits_fails_also_when_it_is_resumed(tmp_path):
    context = make_imitation_context(tmp_path, [make_chat("a", "b" * 40)] * 4, "model.tiny.context_length=32")
    for _ in range(2):
        with pytest.raises(TrainError, match=r"no step of the warm-up changed .*2 rows are longer than .*\)") as caught:
            imitate(context)
        assert read_train_progress(context.campaign.train_progress).failure == str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_warm_up_of_which_some_conversations_fit_is_done(tmp_path):
    context = make_imitation_context(
        tmp_path, [make_chat("a", "b" * 40)] * 3 + [make_chat("a", "b")], "model.tiny.context_length=32"
    )
    assert imitate(context) == 0


def test_rewards_that_all_failed_are_named_with_the_last_reason():
    domains = make_recipe().domains
    failed = make_trajectory("lake/0/0", outcome=OUTCOME_REWARD_ERROR, extra={"reason": "m:f: KeyError: 'x'"})
    evidence = LearningEvidence()
    evidence.note_step(None, num_too_long=0)
    evidence.note_rewards([failed, make_trajectory("lake/0/1", outcome=OUTCOME_TIMEOUT)], domains)
    saved = LearningEvidence.from_checkpoint({"evidence": msgspec.to_builtins(evidence)})
    assert "no reward was ever computed" in saved.find_problem()
    assert "m:f: KeyError: 'x'" in saved.find_problem()


@pytest.mark.parametrize("outcome", ["", "overflow", "max-turns"])
def test_one_reward_of_a_function_is_evidence_enough(outcome):
    failed = make_trajectory("lake/0/0", outcome=OUTCOME_REWARD_ERROR, extra={"reason": "m:f: KeyError: 'x'"})
    evidence = LearningEvidence(has_moved=True)
    evidence.note_rewards([failed, make_trajectory("lake/0/1", outcome=outcome), failed], make_recipe().domains)
    assert evidence.find_problem() is None


def test_a_checkpoint_without_evidence_is_believed():
    assert LearningEvidence.from_checkpoint({"reward": 1.0}).find_problem() is None


def test_steps_after_the_warm_up_must_change_the_weights_too():
    evidence = LearningEvidence()
    evidence.note_step(None, num_too_long=0)
    assert evidence.find_problem(of_warmup=True) is None
    evidence.start_rewards()
    assert evidence.find_problem() is None
    evidence.note_step("a reward is not finite", num_too_long=0)
    assert "no step changed the weights (the last: a reward is not finite)" in evidence.find_problem()
    evidence.note_step(None, num_too_long=0)
    assert evidence.find_problem() is None


def test_a_domain_whose_rewards_all_failed_is_named_though_others_have_some():
    lake = make_recipe().domains["lake"]
    domains, reason = {"lake": lake, "code": lake, "math": lake}, {"reason": "m:f: KeyError: 'x'"}
    failed = [
        make_trajectory(f"{name}/0/{index}", domain=name, outcome=OUTCOME_REWARD_ERROR, extra=reason)
        for name in ("code", "math")
        for index in range(9)
    ]
    evidence = LearningEvidence(has_moved=True)
    evidence.note_rewards([make_trajectory("lake/0/0", domain="lake"), *failed], domains)
    saved = LearningEvidence.from_checkpoint({"evidence": msgspec.to_builtins(evidence)})
    saved.note_rewards([make_trajectory("math/1/0", domain="math"), failed[-1]], domains)
    assert saved.find_problem() is None
    (line,) = saved.list_failing_domains()
    assert line.startswith("domain code: no reward was ever computed")
    assert line.endswith("m:f: KeyError: 'x'")
