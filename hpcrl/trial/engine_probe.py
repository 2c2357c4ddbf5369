"""Compare the log-probs of a vLLM server with a trainer's: `python -m hpcrl.trial.engine_probe DIR`.

The model is a tiny one. The server samples tokens as in a campaign, and a trainer scores them on the same device. One
line of JSON is printed; the files in DIR are left to the caller.

EngineAgreement   what is printed
probe_engine      start, sample, compare
make_sharp_model  the model: each part of it matters for its log-probs, which a random one's does not
compare_logprobs  score sampled tokens with a trainer
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import EngineConfig, TinyModel, TrainConfig
from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.engines.vllm.engine import VllmEngine
from hpcrl.engines.vllm.server import VllmLaunch, find_cause, find_small_kv
from hpcrl.errors import EngineError
from hpcrl.learn.batch import TrainingRow, make_packed_batches
from hpcrl.models.tiny import make_tiny_model
from hpcrl.system.exit_codes import run_for_code
from hpcrl.system.files import make_private_dir
from hpcrl.system.network import current_node
from hpcrl.system.package_range import VLLM, find_installed
from hpcrl.system.terminal import print_json
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import World

ENGINE = EngineConfig(backend="vllm", max_batch=16)
TRAIN = TrainConfig(num_steps=1, groups_per_step=1, learning_rate=0.0)
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 24, 40
NUM_CHARACTERS = 90
"""Token ids below this are characters."""
TOKENS_PER_MICRO_BATCH = 512
FACTORS = {"lm_head": 8.0, "q_proj": 12.0, "k_proj": 12.0, "embed_tokens": 10.0}
OTHER_FACTOR = 6.0
"""The factors of a random model's weights, by a part of their names."""


class EngineAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probs of a server beside those of a trainer."""

    version: str
    """The version of vLLM."""
    start_s: float
    num_tokens: int
    mean_difference: float
    """The mean of the absolute differences, in nats."""
    max_difference: float


async def probe_engine(folder: Path) -> EngineAgreement:
    """Start a server, sample a batch at temperature 1, and score it again."""
    campaign = CampaignDir(folder)
    job = campaign.job(0)
    make_private_dir(job.logs)
    await asyncio.to_thread(make_sharp_model, campaign.model)
    has_gpus = torch.cuda.is_available()
    launch = VllmLaunch(
        model=campaign.model,
        log=job.log("vllm"),
        dtype="auto" if has_gpus else "float32",  # bfloat16 crashes on some CPUs
        max_batch=ENGINE.max_batch,
        has_gpus=has_gpus,
        kv_bytes=find_small_kv(campaign.model, ENGINE) if has_gpus else None,
        extra_args=() if has_gpus else ("--enforce-eager",),  # compilers matter on GPUs
    )
    rng, started = np.random.default_rng(0), time.monotonic()
    prompts = rng.integers(0, NUM_CHARACTERS, (ENGINE.max_batch, NUM_PROMPT_TOKENS)).tolist()
    try:
        async with VllmEngine(launch, place=WorkerPlace(job, current_node())) as engine:
            start_s = time.monotonic() - started
            requests = [
                GenerateRequest(request_id=str(number), token_ids=prompt, max_new_tokens=NUM_NEW_TOKENS)
                for number, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*map(engine.generate, requests))
    except EngineError as error:
        raise EngineError(f"{error} ({find_cause(launch.log, start=0)}: {launch.log})") from error
    differences_N = await asyncio.to_thread(compare_logprobs, campaign.model, prompts, answers)
    return EngineAgreement(
        version=find_installed(VLLM) or "unknown",
        start_s=start_s,
        num_tokens=len(differences_N),
        mean_difference=float(differences_N.mean()),
        max_difference=float(differences_N.max()),
    )


def make_sharp_model(folder: Path) -> None:
    """Make a tiny model whose weights are larger: wrong positions or layers change its log-probs by more than 1."""
    make_tiny_model(folder, TinyModel(), seed=0)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:  # no norm
            tensor.mul_(next((factor for part, factor in FACTORS.items() if part in name), OTHER_FACTOR))
    save_file(tensors, path, metadata={"format": "pt"})


def compare_logprobs(model: Path, prompts: Sequence[list[int]], answers: Sequence[Completion]) -> NDArray[np.float32]:
    """Score the tokens with a trainer; return the absolute differences from the server's log-probs."""
    trainer = TorchTrainer(
        model, TRAIN, world=World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    )
    rows = [_make_row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    batches = trainer.place_batches([make_packed_batches(rows, tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH)])
    [columns] = trainer.compute_logprobs(batches, model=None)
    scored = [
        (column_N - micro.behaviour_N).abs()
        for micro, column_N in zip(batches[0], columns, strict=True)
        if column_N is not None
    ]
    differences_N: NDArray[np.float32] = torch.cat(scored).float().cpu().numpy()
    return differences_N


def _make_row(prompt: list[int], answer: Completion) -> TrainingRow:
    tokens = np.asarray([*prompt, *answer.token_ids], dtype=np.int32)
    num = len(answer.token_ids)
    return TrainingRow(
        inputs=tokens[:-1],
        mask=np.arange(len(tokens) - 1) >= len(prompt) - 1,
        targets=tokens[-num:],
        behaviour=np.asarray(answer.logprobs, dtype=np.float32),
        credit=np.zeros(num, dtype=np.float32),
        versions=np.zeros(num, dtype=np.int32),
    )


def main(folder: Path) -> int:
    """Print how far the two agree; an exit code."""

    def probe() -> int:
        print_json(asyncio.run(probe_engine(folder)))
        return 0

    return run_for_code(probe)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
