"""The routing settings of a recipe: checked before queueing, and used by the router of an env worker."""

import asyncio
import json

import pytest

from hpcrl.campaign_dir.endpoints import announce_endpoint
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.engines.base import GenerateRequest, LoadFigures
from hpcrl.errors import EngineError, PlanError
from hpcrl.rollout.routing.factory import make_router
from hpcrl.testing.event_lines import read_events
from hpcrl.testing.virtual_time import run_virtual
from tests.support.completions import make_completion
from tests.support.endpoints import make_endpoint
from tests.support.plans import make_recipe, plan_recipe

CONFIG = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
REQUEST = GenerateRequest(
    request_id="lake/0/0/0/0/0", token_ids=[1] * 4, max_new_tokens=4, domain="lake", trajectory="t"
)


def test_an_affinity_for_a_domain_that_is_not_there_is_refused_with_the_nearest_name():
    with pytest.raises(PlanError, match=r"unknown domain 'lakes': did you mean 'lake'\?"):
        plan_recipe('router.affinity={lakes="compute"}')


def test_affinities_for_a_domain_and_for_the_rest_are_fine():
    assert plan_recipe('router.affinity={lake="compute", default="bandwidth"}').roles


class FixedEngine:
    """An engine that always returns the same token."""

    async def generate(self, request):
        return make_completion(finish_reason="length")

    async def load_figures(self):
        return LoadFigures(version=0, num_running=0, num_waiting=0, num_generated_tokens=0)


ENDPOINT = make_endpoint(gpu="h20", num_gpus=1)


def play_turn(tmp_path, config, *settings, engine_after_s=0.0):
    """Serve a turn by the router of a recipe, whose only engine is announced later; return the campaign."""
    campaign = CampaignDir(tmp_path)
    for path in (campaign.endpoints, campaign.events, campaign.model):
        path.mkdir(parents=True)
    (campaign.model / "config.json").write_text(json.dumps(config))
    recipe = make_recipe(*settings)

    async def turn():
        log = EventLog(campaign.events / "env.jsonl", role="env")
        worker, connect = EnvWorkerId(0, 1), lambda _: FixedEngine()
        async with make_router(recipe, campaign, job=0, worker=worker, connect=connect, seed=0, events=log) as router:
            serving = asyncio.create_task(router.generate(REQUEST))
            await asyncio.sleep(engine_after_s)
            announce_endpoint(campaign.endpoints, ENDPOINT)
            await serving
        log.close()

    run_virtual(turn())
    return campaign


def routed(tmp_path, config, *settings):
    """Return the one decision that the router of a recipe logs for a turn."""
    campaign = play_turn(tmp_path, config, "router.log_share=1.0", *settings)
    (decision,) = [event for event in read_events(campaign.events) if event["event"] == "route"]
    return decision


def test_the_router_of_a_recipe_uses_the_model_and_the_gpu(tmp_path):
    decision = routed(tmp_path, CONFIG)
    assert decision["decode"] == "000-decode-0"
    assert 0 < decision["serve_s"] < 1


def test_the_router_knows_engines_whose_weights_have_8_bits(tmp_path):
    fp8 = ("engine.backend=vllm", "engine.quantization=fp8")
    plain, rounded = routed(tmp_path / "plain", CONFIG), routed(tmp_path / "fp8", CONFIG, *fp8)
    assert rounded["serve_s"] < 0.7 * plain["serve_s"]


def test_a_model_with_other_field_names_is_routed_without_a_cost_model(tmp_path):
    assert routed(tmp_path, {"n_embd": 8})["serve_s"] == 1.0


def test_a_turn_waits_for_an_engine_as_long_as_the_recipe_lets_one_start(tmp_path):
    assert play_turn(tmp_path / "run", CONFIG, "engine.start_timeout_s=1000", engine_after_s=990.0)
    with pytest.raises(EngineError, match=r"was available for 400 s"):
        play_turn(tmp_path / "short", CONFIG, "engine.start_timeout_s=400", engine_after_s=990.0)
