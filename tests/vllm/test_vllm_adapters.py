"""Versions that are adapters (LoRA) in a running vLLM engine, whose own weights never change."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpcrl.config.recipe import TrainConfig
from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.engines.embedded.engine import load_model
from hpcrl.errors import WeightsError
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.weights.model_update import copy_weights
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.versions import WeightVersion
from tests.support.served import greedy
from tests.support.trained import compute_logprobs, make_deep_model, train_once

if TYPE_CHECKING:
    from tests.support.served import Behind, Place

PROMPT = [2, 45, 78, 5, 36, 3]
RANK, LONG = 5, 150
CLOSE = 1e-3
DOWN = "model.layers.0.self_attn.q_proj.lora_A.weight"


@dataclass
class AdapterServer:
    """An engine that gets adapters, and the trainer that makes them."""

    place: "Place"
    behind: "Behind"
    trainer: TorchTrainer

    def find_next_version(self) -> int:
        """Return the next version; a file with the last may have been refused."""
        newest = FileStore(self.place.campaign.weights).newest()
        return max(self.behind.engine.version, newest.version if newest else 0) + 1

    def publish(self) -> int:
        """Train a step, publish its adapters to the window of the node, and return the version."""
        version = self.find_next_version()
        train_once(self.trainer, step=version)
        self.place.window.publish(self.trainer.tensors(), WeightVersion(version=version, step=version))
        return version

    def load(self, version: int) -> None:
        self.place.do(self.behind.engine.load_version(version))

    def ask(self, name: str, **changes: Any) -> Completion:
        return self.place.do(self.behind.engine.generate(make_request(name, **changes)))

    def merge(self) -> Any:
        """Return transformers' model with the trainer's adapters added to its weights."""
        model = load_model(self.place.model, device="cpu")
        copy_weights(model, dict(self.trainer._policy.tensors()))
        return model


def make_request(name: str, **changes: Any) -> GenerateRequest:
    fields = {"request_id": name, "token_ids": PROMPT, "max_new_tokens": 24, "temperature": 0.0}
    return GenerateRequest(**(fields | changes))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[AdapterServer]":
    from tests.support.served import place

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("adapters")
    make_deep_model(root / "model")
    train = TrainConfig(
        num_steps=9, groups_per_step=1, learning_rate=3e-2, lora_rank=RANK, lora_alpha=16.0, publish_lora="adapters"
    )
    trainer = TorchTrainer(root / "model", train, seed=0)
    with place(root / "campaign", root / "model", lora_rank=RANK) as there, there.engines("adapters") as (behind,):
        yield AdapterServer(place=there, behind=behind, trainer=trainer)


def test_each_version_has_the_log_probs_of_the_trainer_and_of_the_merged_model(server: AdapterServer) -> None:
    before = server.ask("before")
    assert set(before.versions) == {0}
    earlier = before.logprobs
    for _ in range(2):
        version = server.publish()
        server.load(version)
        answer = server.ask(f"version {version}", temperature=1.0)
        assert set(answer.versions) == {version}
        assert answer.logprobs == pytest.approx(compute_logprobs(server.trainer, PROMPT, answer.token_ids), abs=CLOSE)
        likeliest = server.ask(f"likeliest {version}")
        assert likeliest.token_ids == greedy(server.merge(), PROMPT, likeliest.token_ids)
        assert likeliest.logprobs != pytest.approx(earlier, abs=CLOSE), "the version has changed them"
        earlier = likeliest.logprobs


def test_a_turn_continues_through_new_adapters_and_every_token_has_its_version(server: AdapterServer) -> None:
    engine, old = server.behind.engine, server.behind.engine.version
    before = server.merge()
    version = server.publish()

    async def body() -> Completion:
        start = (await engine.load_figures()).num_generated_tokens
        turn = asyncio.create_task(engine.generate(make_request("long", max_new_tokens=LONG)))
        while (await engine.load_figures()).num_generated_tokens < start + 10:
            await asyncio.sleep(0.01)
        await engine.load_version(version)
        return await turn

    answer = server.place.do(body())
    switch = answer.versions.index(version)
    assert answer.versions == [old] * switch + [version] * (LONG - switch)
    assert answer.token_ids[:switch] == greedy(before, PROMPT, answer.token_ids[:switch])
    assert answer.token_ids[switch:] == greedy(server.merge(), PROMPT, answer.token_ids)[switch:]


@pytest.mark.parametrize("wrong", ["missing", "shape", "rank", "merged"])
def test_adapters_that_do_not_fit_are_named_and_the_old_ones_stay(server: AdapterServer, wrong: str) -> None:
    tensors, version = dict(server.trainer.tensors()), server.find_next_version()
    match wrong:
        case "missing":
            del tensors[DOWN]
        case "shape":
            tensors[DOWN] = tensors[DOWN][:, 1:]
        case "rank":
            tensors = {name: torch.zeros(9, 9) for name in tensors}
        case "merged":
            tensors = dict(server.trainer._policy.tensors())
    FileStore(server.place.campaign.weights).publish(tensors, WeightVersion(version=version, step=version))
    before = server.ask("before")
    named = {"rank": "rank 9", "merged": "lora_A"}
    with pytest.raises(WeightsError, match=named.get(wrong, DOWN)):
        server.load(version)
    after = server.ask("after")
    assert (after.token_ids, after.versions, after.logprobs) == (before.token_ids, before.versions, before.logprobs)


def test_adapters_come_as_files_too_and_reach_prompts_that_are_in_the_prefix_cache(server: AdapterServer) -> None:
    store, prompt = FileStore(server.place.campaign.weights), PROMPT * 20
    server.ask("fill the prefix cache", token_ids=prompt)
    version = server.find_next_version()
    train_once(server.trainer, step=version)
    store.publish(server.trainer.tensors(), WeightVersion(version=version, step=version))
    server.load(version)
    answer = server.ask("files", token_ids=prompt)
    assert set(answer.versions) == {version}
    assert answer.token_ids == greedy(server.merge(), prompt, answer.token_ids)
