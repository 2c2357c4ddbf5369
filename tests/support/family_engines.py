"""vLLM engines of small models of real families, whose trainer publishes updates to them.

PROMPT, CLOSE           the tokens that they continue, and how much log-probabilities differ by rounding
make_served_model       a model that vLLM can load
assert_follows_trainer  an engine has the trainer's log-probs, at first and after each of two updates
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.config.recipe import TinyModel
from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.engines.vllm.engine import VllmEngine
from hpcrl.models.tiny import _make_tokenizer
from hpcrl.weights.versions import WeightVersion
from tests.support.families import make_family_model
from tests.support.trained import ExportedModel, compute_logprobs, train_once

if TYPE_CHECKING:
    from tests.support.served import Place

PROMPT = [2, 45, 78, 5, 36, 3]
CLOSE = 1e-3


def make_served_model(directory: Path, *, family: str) -> None:
    tokenizer = _make_tokenizer(TinyModel())
    make_family_model(directory, family, vocab_size=len(tokenizer), max_position_embeddings=256)
    tokenizer.save_pretrained(directory)


def assert_follows_trainer(engine: VllmEngine, place: "Place", model: ExportedModel, *, num_requests: int = 1) -> None:
    """Compare the log-probs of requests at the same time with the trainer's; they are the export's at first alone."""
    trainer, exported = model.trainer, AutoModelForCausalLM.from_pretrained(model.exported)
    earlier: list[list[float]] = []
    for version in (0, 1, 2):
        if version:
            train_once(trainer, step=version + 2)
            place.window.publish(trainer.tensors(), WeightVersion(version=version, step=version))
            place.do(engine.load_version(version))
        answers = place.do(_ask(engine, version=version, num=num_requests))
        for answer in answers:
            assert set(answer.versions) == {version}
            assert answer.logprobs == pytest.approx(compute_logprobs(trainer, PROMPT, answer.token_ids), abs=CLOSE)
            with torch.no_grad():
                logprobs_TV = exported(torch.tensor([PROMPT + answer.token_ids])).logits[0].log_softmax(-1)
            scored = [float(logprobs_TV[len(PROMPT) - 1 + at, token]) for at, token in enumerate(answer.token_ids)]
            assert (answer.logprobs == pytest.approx(scored, abs=CLOSE)) == (version == 0)
            assert answer.logprobs not in earlier
        earlier = [answer.logprobs for answer in answers]


async def _ask(engine: VllmEngine, *, version: int, num: int) -> list[Completion]:
    requests = [
        GenerateRequest(request_id=f"{version}-{at}", token_ids=PROMPT, max_new_tokens=24, temperature=1.0)
        for at in range(num)
    ]
    return await asyncio.gather(*(engine.generate(request) for request in requests))
