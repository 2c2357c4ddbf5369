"""Models of real families in vLLM: it loads the export of one, and takes updates under the names of its files."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.config.recipe import TinyModel
from hpcrl.engines.base import GenerateRequest
from hpcrl.models.tiny import _make_tokenizer
from hpcrl.weights.versions import WeightVersion
from tests.support.families import DENSE_FAMILIES, EXPERT_FAMILIES, make_family_model
from tests.support.trained import ExportedModel, compute_logprobs, train_and_export, train_once

if TYPE_CHECKING:
    from tests.support.served import Place

pytestmark = pytest.mark.long
PROMPT = [2, 45, 78, 5, 36, 3]
CLOSE = 1e-3
FAMILIES = (*DENSE_FAMILIES, *EXPERT_FAMILIES)


def make_served_model(directory: Path, *, family: str) -> None:
    tokenizer = _make_tokenizer(TinyModel())
    make_family_model(directory, family, vocab_size=len(tokenizer), max_position_embeddings=256)
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="module", params=FAMILIES)
def exported_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    make_model = partial(make_served_model, family=request.param)
    return train_and_export(tmp_path_factory.mktemp(request.param), make_model=make_model)


@pytest.fixture(scope="module")
def served_place(exported_model: ExportedModel, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Place]":
    from tests.support.served import place

    with (
        pytest.MonkeyPatch.context() as patch,
        place(tmp_path_factory.mktemp("place") / "campaign", exported_model.exported) as there,
    ):
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # vLLM's routers for CPUs would be compiled, which takes a minute
        yield there


def test_a_model_has_the_trainers_logprobs_from_its_export_and_after_each_update(
    exported_model: ExportedModel, served_place: "Place"
) -> None:
    trainer, exported = exported_model.trainer, AutoModelForCausalLM.from_pretrained(exported_model.exported)
    earlier: list[float] = []
    with served_place.engines("family") as (behind,):
        for version in (0, 1, 2):
            if version:
                train_once(trainer, step=version + 2)
                served_place.window.publish(trainer.tensors(), WeightVersion(version=version, step=version))
                served_place.do(behind.engine.load_version(version))
            request = GenerateRequest(request_id=f"{version}", token_ids=PROMPT, max_new_tokens=24, temperature=1.0)
            answer = served_place.do(behind.engine.generate(request))
            assert set(answer.versions) == {version}
            assert answer.logprobs == pytest.approx(compute_logprobs(trainer, PROMPT, answer.token_ids), abs=CLOSE)
            with torch.no_grad():
                logprobs_TV = exported(torch.tensor([PROMPT + answer.token_ids])).logits[0].log_softmax(-1)
            scored = [float(logprobs_TV[len(PROMPT) - 1 + at, token]) for at, token in enumerate(answer.token_ids)]
            assert (answer.logprobs == pytest.approx(scored, abs=CLOSE)) == (version == 0)
            assert answer.logprobs != earlier
            earlier = answer.logprobs
