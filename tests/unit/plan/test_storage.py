"""The space that a campaign needs on the shared file system."""

from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign import submission_checks
from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission_checks import check_plan, check_request
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.hardware.architecture import read_architecture
from hpcrl.plan.demand import average_episode, count_episodes
from hpcrl.plan.storage import (
    StorageForecast,
    forecast_storage,
    judge_free_space,
    warn_late_retirement,
)
from hpcrl.system.free_space import FreeSpace
from tests.support.plans import plan_recipe
from tests.unit.plan.test_router_replay import QWEN3_MOE

GIB = 2**30
SIZE = "model.num_params=20_000_000"


def load_recipe(*settings: str) -> Recipe:
    return load_request("quickstart", site="local", settings=(SIZE, *settings)).recipe


def test_checkpoints_have_weights_and_two_moments_in_full_precision() -> None:
    recipe = load_recipe("train.keep_checkpoints=1", "train.keep_best=2")
    shape = recipe.model.architecture
    need = forecast_storage(recipe)
    assert shape is not None
    assert need is not None
    assert need.num_checkpoints == 2, "those that are kept, and one that is being written"
    assert need.checkpoint_gib == pytest.approx(12 * shape.num_params / GIB)
    assert need.milestones_gib == pytest.approx(2 * 4 * shape.num_params / GIB), "the weights of the best"
    assert need.fixed_gib == pytest.approx((2 * 12 + 2 * 4) * shape.num_params / GIB + need.versions_gib)
    rounded = forecast_storage(load_recipe("train.moments_dtype=bfloat16"))
    assert rounded is not None
    assert rounded.checkpoint_gib == pytest.approx(8 * shape.num_params / GIB)


def test_the_experts_of_tokens_are_counted_where_they_are_recorded() -> None:
    plain = load_recipe("train.num_steps=1000", "rollout.max_lag=1")
    model = msgspec.structs.replace(plain.model, tiny=None, path="/models/qwen", config=QWEN3_MOE)
    assert read_architecture(QWEN3_MOE).choice_bytes == 48 * 8
    assert read_architecture(QWEN3_MOE | {"num_experts": 256}).choice_bytes == 2 * 48 * 8
    found = []
    for replays in (False, True):
        train = msgspec.structs.replace(plain.train, router_replay=replays)
        recipe = msgspec.structs.replace(plain, model=model, train=train)
        need = forecast_storage(recipe)
        assert need is not None
        found.append(need.trajectories_gib)
    num_tokens = average_episode(recipe)[1] * count_episodes(recipe)
    assert (found[1] - found[0]) * GIB == pytest.approx(48 * 8 * num_tokens)


def test_checkpoints_of_adapters_are_small() -> None:
    whole, adapters = forecast_storage(load_recipe()), forecast_storage(load_recipe("train.lora_rank=1"))
    assert whole is not None
    assert adapters is not None
    assert adapters.checkpoint_gib < whole.checkpoint_gib / 5
    assert adapters.versions_gib == whole.versions_gib, "merged"
    alone = forecast_storage(load_recipe("train.lora_rank=1", 'train.publish_lora="adapters"', 'engine.backend="vllm"'))
    assert alone is not None
    assert alone.versions_gib < whole.versions_gib / 5


def test_a_campaign_without_room_for_its_checkpoints_is_refused_before_it_is_queued(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = load_request("quickstart", site="local", settings=(SIZE,))
    need = forecast_storage(request.recipe)
    assert need is not None
    free = int(need.fixed_gib * GIB)
    monkeypatch.setattr(submission_checks, "find_free_space", lambda _: FreeSpace(free - 1, 1e6))
    with pytest.raises(
        ConfigError, match=r"GiB free \(by .*this campaign needs .*site.campaigns_dir.*keep_checkpoints"
    ):
        check_request(request)
    assert any("this campaign needs" in note for note in check_plan(request)), "a plan may be for another machine"
    monkeypatch.setattr(submission_checks, "find_free_space", lambda _: FreeSpace(free + 1, 1e6))
    check_request(request)


def test_a_campaign_without_room_for_its_files_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission_checks, "find_free_space", lambda _: FreeSpace(1e15, 900.0, source="`quota`"))
    with pytest.raises(ConfigError, match=r"has room for 900 more files \(by `quota`\)"):
        check_request(load_request("quickstart", site="local", settings=(SIZE,)))


def test_a_full_disk_refuses_a_model_of_unknown_size_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission_checks, "find_free_space", lambda _: FreeSpace(8 << 10, 1e6))
    with pytest.raises(ConfigError, match=r"has 0.00781 MiB free .*too little for the logs of a job"):
        check_request(load_request("quickstart", site="local"))


def make_forecast(**changed: float) -> StorageForecast:
    facts = {
        **{
            "checkpoint_gib": 8.0,
            "num_checkpoints": 3,
            "milestones_gib": 6.0,
            "versions_gib": 10.0,
            "trajectories_gib": 1.0,
        },
        **{"num_steps": 100, "num_waiting": 20, "num_archived": 80, "logs_gib": 0.1, "steps_per_day": 10.0},
    }
    return StorageForecast(**facts | changed)  # type: ignore[arg-type]


def test_free_space_lasts_as_long_as_the_spools_and_then_the_archive_need_to_fill_it() -> None:
    forecast = make_forecast()
    assert forecast.gib == 40 + 2 * 20 + 80
    assert forecast.count_days(40 + 20) == pytest.approx(1.0), "each step is in both spools"
    assert forecast.count_days(40 + 2 * 20 + 30) == pytest.approx(5.0), "and then once in the archive"
    assert forecast.count_days(160) == float("inf")
    assert make_forecast(steps_per_day=None).count_days(50) == float("inf"), "the pace is not known"


def test_space_for_less_than_a_day_is_refused_with_the_fix() -> None:
    with pytest.raises(
        ConfigError, match=r'/x has 59 GiB, .* full after 22\.8 hours: set site\.campaigns_dir.*keep = "v'
    ):
        judge_free_space(make_forecast(), free_gib=59, place="/x has 59 GiB")
    note = judge_free_space(make_forecast(), free_gib=110, place="/x has 110 GiB")
    assert note.startswith("/x has 110 GiB: room for 5 days or more, as this campaign needs up to 160 GiB")
    assert 'spool.keep = "versions"' in note
    assert judge_free_space(make_forecast(), free_gib=200, place="/x has 200 GiB").endswith("needs up to 160 GiB")


def test_trajectories_that_checkpoints_hold_back_are_forecast_and_warned_of() -> None:
    settings = ("train.num_steps=5000", "train.keep_checkpoints=2", "rollout.max_lag=1")
    often = load_recipe(*settings, "train.checkpoint_every_steps=10")
    rarely = load_recipe(*settings, "train.checkpoint_every_steps=2000")
    forecast = forecast_storage(often)
    assert forecast is not None
    assert (forecast.num_waiting, forecast.num_archived) == (22, 4978)
    assert warn_late_retirement(forecast, often) == []
    (warning,) = warn_late_retirement(forecast_storage(rarely), rarely)
    assert "those of 4002 steps are" in warning
    assert "lower train.checkpoint_every_steps (2000)" in warning


@pytest.mark.parametrize(("keep", "num"), [("all", 978), ("versions", 100), ("none", 0)])
def test_the_archive_is_forecast_by_what_is_kept(keep: str, num: int) -> None:
    forecast = forecast_storage(load_recipe("train.num_steps=1000", "rollout.max_lag=1", f'spool.keep="{keep}"'))
    assert forecast is not None
    assert forecast.num_archived == num


def test_the_pace_of_known_gpus_makes_the_forecast_one_of_days() -> None:
    (line,) = [size for size in plan_recipe(recipe="qwen3-8b-math", site="perlmutter").sizes if "directory" in size]
    assert "checkpoints of" in line
    assert "an archive of" in line
    assert "a day, besides logs" in line
