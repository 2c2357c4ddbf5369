"""A whole campaign with two trainer ranks: killed while they prefetch, resumed, and exported as one model."""

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.testing.event_lines import read_events
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.versions import list_versions
from tests.e2e.conftest import CrashedCampaign
from tests.support.campaigns import events_of, num_consumed_groups
from tests.support.shared_gpus import find_overlaps, list_shifts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_killed_driver_leaves_no_process_and_no_window(crashed: CrashedCampaign) -> None:
    assert "killed by signal 9" in crashed.ended["reason"]
    assert crashed.left == []


def test_two_ranks_killed_with_their_driver_resume_and_train_every_group_once(crashed: CrashedCampaign) -> None:
    seen = crashed.seen
    assert (seen["state"], seen["step"], len(seen["jobs"])) == ("done", crashed.num_steps, 2)
    assert (
        num_consumed_groups(crashed.campaign) == crashed.num_steps * 2
    )  # a group that is trained on twice counts once
    events = list(read_events(crashed.campaign.events))
    chosen = {event["job"]: event["transport"] for event in reversed(events) if event["event"] == "transport"}
    assert chosen == {0: "window", 1: "window"}, "later, a machine that is too busy may make an engine ask for files"
    published = {event["version"]: event["job"] for event in events if event["event"] == "published"}
    newest_of_killed = max(version for version, job in published.items() if job == 0)
    expected = set(range(crashed.num_steps + 1)) - {newest_of_killed + 1}  # it may have been killed in between
    assert published.keys() >= expected


def test_two_ranks_save_one_model_which_is_what_they_published(crashed: CrashedCampaign) -> None:
    newest = sorted(crashed.campaign.checkpoints.iterdir())[-1]
    assert (
        len(list(newest.glob("state-?????.safetensors"))) == len(list(newest.glob("state-*-moments.safetensors"))) == 2
    )
    model = AutoModelForCausalLM.from_pretrained(crashed.model)
    assert (model.config.model_type, model.dtype) == ("qwen2", torch.float32)
    store, trained = FileStore(crashed.campaign.weights), dict(model.named_parameters())
    published = store.load(list_versions(crashed.campaign.weights)[-1])
    assert all(torch.equal(tensor, trained[name].bfloat16()) for name, tensor in published.items())


def test_a_machine_with_two_gpus_gives_them_to_trainer_and_engines_in_turns(crashed: CrashedCampaign) -> None:
    started = [event for event in events_of(crashed.campaign, "worker-started") if event["job"] == 0]
    gpus = {role: sorted(event["gpus"] for event in started if event["role"] == role) for role in ("train", "decode")}
    assert gpus == {"train": [["0"], ["1"]], "decode": [["0"], ["1"]]}
    shifts = Counter(shift.role for shift in list_shifts(crashed.campaign))
    assert shifts["train"] > 2, "its state was in host memory in between"
    assert shifts["decode"] > 2 * 2
    assert find_overlaps(crashed.campaign) == []
