"""The comparison of a server's log-probs with a trainer's, with a model in the server's place."""

from pathlib import Path

import pytest
import torch

from hpcrl.doctor.node_checks import MAX_MEAN_DIFFERENCE
from hpcrl.engines.base import Completion
from hpcrl.engines.embedded.engine import load_model
from hpcrl.trial.engine_probe import compare_logprobs, make_sharp_model

NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 8, 16, 24


@pytest.fixture(scope="module")
def sharp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "model"
    make_sharp_model(folder)
    return folder


def sample_answers(
    model_dir: Path, *, position_step: int = 1, without: str = ""
) -> tuple[list[list[int]], list[Completion]]:
    """Sample from the model, with positions as far apart as given, and without the layers of a name."""
    model = load_model(model_dir, device="cpu")
    for name, weight in model.named_parameters():
        if without and without in name:
            weight.zero_()
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(0, 90, (NUM_PROMPTS, NUM_PROMPT_TOKENS), generator=generator)
    prompts, picked = ids_BT.tolist(), []
    for _ in range(NUM_NEW_TOKENS):
        positions_BT = (torch.arange(ids_BT.shape[1]) * position_step).expand(NUM_PROMPTS, -1)
        logprobs_BV = model(ids_BT, position_ids=positions_BT).logits[:, -1].log_softmax(-1)
        next_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        picked.append(logprobs_BV.gather(-1, next_B1))
        ids_BT = torch.cat([ids_BT, next_B1], 1)
    logprobs_BN = torch.cat(picked, 1)
    answers = [
        Completion(
            token_ids=ids_BT[row, NUM_PROMPT_TOKENS:].tolist(),
            logprobs=logprobs_BN[row].tolist(),
            versions=[0] * NUM_NEW_TOKENS,
            finish_reason="length",
        )
        for row in range(NUM_PROMPTS)
    ]
    return prompts, answers


def test_a_server_that_computes_as_the_trainer_agrees_with_it(sharp_model: Path) -> None:
    prompts, answers = sample_answers(sharp_model)
    differences_N = compare_logprobs(sharp_model, prompts, answers)
    assert len(differences_N) == NUM_PROMPTS * NUM_NEW_TOKENS
    assert differences_N.max() < 1e-3


@pytest.mark.parametrize(("position_step", "without"), [(0, ""), (2, ""), (1, "down_proj"), (1, "o_proj")])
def test_wrong_positions_and_missing_layers_are_found(sharp_model: Path, position_step: int, without: str) -> None:
    prompts, answers = sample_answers(sharp_model, position_step=position_step, without=without)
    assert compare_logprobs(sharp_model, prompts, answers).mean() > 5 * MAX_MEAN_DIFFERENCE
