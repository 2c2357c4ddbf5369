"""An export of `hpcrl export` served by vLLM: its log-probabilities are those of the trainer."""

from typing import TYPE_CHECKING

import pytest

from hpcrl.config.recipe import TrainConfig
from hpcrl.engines.base import GenerateRequest
from hpcrl.trainers.torch import TorchTrainer
from tests.support.trained import ExportedModel, compute_logprobs

if TYPE_CHECKING:
    from tests.support.served import Behind, Place

PROMPT = [2, 45, 78, 5, 36, 3]
NUM_TOKENS = 24
CLOSE = 1e-3


def test_vllm_loads_the_export_and_agrees_with_the_trainer(
    trained: ExportedModel, pair: "list[Behind]", vllm_place: "Place"
) -> None:
    request = GenerateRequest(request_id="a", token_ids=PROMPT, max_new_tokens=NUM_TOKENS, temperature=1.0)
    answer = vllm_place.do(pair[0].engine.generate(request))
    assert len(answer.token_ids) > 4
    assert answer.logprobs == pytest.approx(compute_logprobs(trained.trainer, PROMPT, answer.token_ids), abs=CLOSE)
    initial = TorchTrainer(trained.initial, TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0))
    assert answer.logprobs != pytest.approx(compute_logprobs(initial, PROMPT, answer.token_ids), abs=0.1)
