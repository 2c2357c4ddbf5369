"""The space that a campaign needs on the shared file system."""

from pathlib import Path

import pytest

from hpcrl.campaign import submission_checks
from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission_checks import check_request
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.plan.storage import estimate_storage
from hpcrl.system.free_space import FreeSpace

GIB = 2**30
SIZE = "model.num_params=20_000_000"


def load_recipe(*settings: str) -> Recipe:
    return load_request("quickstart", site="local", settings=(SIZE, *settings)).recipe


def test_checkpoints_have_weights_and_two_moments_in_full_precision() -> None:
    recipe = load_recipe("train.keep_checkpoints=1", "train.keep_best=2")
    shape = recipe.model.architecture
    need = estimate_storage(recipe)
    assert shape is not None
    assert need is not None
    assert need.num_checkpoints == 4, "those that are kept, and one that is being written"
    assert need.checkpoints_gib == pytest.approx(4 * 12 * shape.num_params / GIB)


def test_checkpoints_of_adapters_are_small() -> None:
    whole, adapters = estimate_storage(load_recipe()), estimate_storage(load_recipe("train.lora_rank=1"))
    assert whole is not None
    assert adapters is not None
    assert adapters.checkpoints_gib < whole.checkpoints_gib / 5
    assert adapters.versions_gib == whole.versions_gib


def test_a_campaign_without_room_for_its_checkpoints_is_refused_before_it_is_queued(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = load_request("quickstart", site="local", settings=(SIZE,))
    need = estimate_storage(request.recipe)
    assert need is not None
    free = int(need.gib * GIB)
    monkeypatch.setattr(submission_checks, "find_free_space", lambda _: FreeSpace(free - 1, 1e6))
    with pytest.raises(
        ConfigError, match=r"GiB free \(by .*this campaign needs .*site.campaigns_dir.*keep_checkpoints"
    ):
        check_request(request)
    monkeypatch.setattr(submission_checks, "find_free_space", lambda _: FreeSpace(free + 1, 1e6))
    check_request(request)


def test_a_campaign_without_room_for_its_files_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission_checks, "find_free_space", lambda _: FreeSpace(1e15, 900.0, source="`quota`"))
    with pytest.raises(ConfigError, match=r"has room for 900 more files \(by `quota`\)"):
        check_request(load_request("quickstart", site="local", settings=(SIZE,)))
