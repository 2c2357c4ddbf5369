"""The trainer of the train role: the models that it holds beside the policy."""

import pytest

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import load_site
from hpcrl.plan.plan import make_plan
from hpcrl.roles.context import WorkerContext
from hpcrl.roles.train import _make_trainer
from hpcrl.system.files import make_private_dir
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.plans import make_recipe


@pytest.mark.parametrize("trainer", ["torch", "megatron"])
@pytest.mark.parametrize(
    ("settings", "models"),
    [
        (("judge.grader.tiny={}", "teacher.judge=grader"), set()),
        (('teacher.path="{model}"',), {"reference"}),
        ((), {"reference"}),
    ],
)
def test_a_rank_holds_a_reference_unless_a_judge_is_the_teacher(tmp_path, tiny_model_dir, trainer, settings, models):
    if trainer == "megatron":
        pytest.importorskip("megatron.core", reason="needs megatron-core")
    run, site = CampaignDir(tmp_path), load_site("local")
    make_private_dir(run.events)
    run.model.symlink_to(tiny_model_dir)
    given = [setting.replace("{model}", str(tiny_model_dir)) for setting in settings]
    recipe = make_recipe("train.kl=k2", f"train.trainer={trainer}", *given)
    context = WorkerContext(
        campaign=run,
        job=run.job(0),
        role="train",
        index=0,
        recipe=recipe,
        site=site,
        plan=make_plan(recipe, site),
        events=EventLog(run.events / "train.jsonl", job=0, role="train", worker="000-train-0", node="n"),
    )
    made = _make_trainer(context, SINGLE_RANK)
    assert set(made._fixed_models) == models
    assert made.has_scored_reference == (not models)
