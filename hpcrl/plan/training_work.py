"""The work of a training step under a plan, with what its ranks send each other. Pure.

plan_training_work   the work, by the settings that the plan has chosen
find_rank_links      the links between ranks; None where they have no GPUs
"""

from math import ceil

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.hardware.architecture import ModelArchitecture
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S, TrainingWork
from hpcrl.hardware.gpus import GpuModel
from hpcrl.hardware.rank_traffic import NO_TRAFFIC, RankLinks, StepBatch, estimate_traffic
from hpcrl.plan.demand import make_megatron_setup, make_rank_setup, settle_precision
from hpcrl.plan.plan import Plan


def plan_training_work(
    recipe: Recipe,
    plan: Plan,
    *,
    architecture: ModelArchitecture,
    gpu: GpuModel,
    links: RankLinks | None,
    num_tokens: float,
    mean_length: float,
) -> TrainingWork:
    """Return the work on this many tokens; without links its ranks send nothing."""
    train = msgspec.structs.replace(recipe.train.with_degrees(plan.train_degrees), sharding=plan.train_sharding)
    recipe, planned = settle_precision(msgspec.structs.replace(recipe, train=train), gpu), plan.role("train")
    num_shares, num_updates = planned.num_workers / plan.train_degrees.num_together, train.num_minibatches
    num_micro_batches = num_updates * max(
        1, ceil(num_tokens / (num_shares * num_updates * plan.tokens_per_micro_batch))
    )
    batch = StepBatch(num_tokens=num_tokens, num_micro_batches=num_micro_batches, num_updates=num_updates)
    make_setup = make_megatron_setup if train.trainer == "megatron" else make_rank_setup
    traffic = NO_TRAFFIC
    if links is not None:
        traffic = estimate_traffic(architecture, make_setup(recipe, has_recompute=False), batch=batch, links=links)
    return TrainingWork(
        num_tokens=num_tokens,
        mean_length=mean_length,
        num_gpus=planned.num_workers * max(1, planned.gpus_per_worker),
        pp=plan.train_degrees.pipeline,
        pp_chunks=train.pipeline_chunks,
        num_micro_batches=num_micro_batches,
        traffic=traffic,
    )


def find_rank_links(plan: Plan, site: Site, *, gpu: GpuModel) -> RankLinks | None:
    """Return the links between ranks on such GPUs; None for a single rank, and on CPUs."""
    planned, gbit = plan.role("train"), site.network.gbit_per_gpu
    if planned.num_workers == 1 or not planned.gpus_per_worker:
        return None
    both_ways = gpu.link_gb_per_s
    return RankLinks(
        ranks_per_node=planned.workers_per_node,
        link=RankLinks.link if both_ways is None else both_ways * 1e9 / 2,
        port=LINK_BYTES_PER_S if gbit is None else gbit * 1e9 / 8,
    )
