"""Make the router of an env worker for a recipe and its model.

make_router               the router
MAX_AWAITED_REFRESH_S     the longest interval while something is awaited
MAX_LOAD_REQUESTS_PER_S   the requests for its load that an engine gets, from all env workers together
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from hpcrl.campaign_dir.endpoints import EndpointReader, EngineEndpoint
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.engine_speed import estimate_engine_speed
from hpcrl.config.recipe import Recipe
from hpcrl.engines.base import InferenceEngine
from hpcrl.hardware.cost_model import ModelShape, WorkerSpeed, read_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE, GpuModel
from hpcrl.models.model_config import read_model_config
from hpcrl.rollout.routing.role_switch import RoleSwitcher
from hpcrl.rollout.routing.router import DEFAULT_TIMEOUTS, Router

MAX_LOAD_REQUESTS_PER_S = 8.0
MAX_AWAITED_REFRESH_S = 2.0
"""The interval where an engine or the newest weights are awaited, however many env workers there are."""


def make_router(
    recipe: Recipe,
    campaign: CampaignDir,
    *,
    job: int,
    worker: EnvWorkerId,
    connect: Callable[[EngineEndpoint], InferenceEngine],
    seed: int,
    events: EventLog,
    find_gpu: Callable[[str], GpuModel | None] = GPU_CATALOGUE.get,
) -> Router:
    """Make the router of an env worker; worker 0 also decides role switches, if the recipe allows them."""
    shape = _load_model_shape(Path(recipe.engine.sim.config or campaign.model / "config.json"))

    def endpoint_speed(endpoint: EngineEndpoint) -> WorkerSpeed | None:
        gpu = find_gpu(endpoint.gpu or "")
        if gpu is None or not gpu.has_speed or shape is None:
            return None
        return estimate_engine_speed(recipe.engine, gpu=gpu, shape=shape, num_gpus=endpoint.num_gpus)

    rules, share_s = recipe.router, worker.count / MAX_LOAD_REQUESTS_PER_S
    awaited_s = min(share_s, MAX_AWAITED_REFRESH_S)
    switcher = None
    if rules.switch_roles or rules.sizing == "auto":
        switcher = RoleSwitcher(campaign.switched_roles, rules=rules, is_leader=worker.index == 0)
    return Router(
        EndpointReader(campaign.endpoints, job=job),
        connect=connect,
        seed=seed,
        timeouts=dataclasses.replace(
            DEFAULT_TIMEOUTS,
            refresh_interval_s=max(DEFAULT_TIMEOUTS.refresh_interval_s, share_s),
            least_refresh_interval_s=max(DEFAULT_TIMEOUTS.least_refresh_interval_s, awaited_s),
            no_decode_timeout_s=max(DEFAULT_TIMEOUTS.no_decode_timeout_s, recipe.engine.start_timeout_s),
        ),
        rules=rules,
        weights={name: domain.weight for name, domain in recipe.domains.items()},
        speed_of=endpoint_speed,
        switcher=switcher,
        on_route=events.emit if rules.log_share else None,
        find_gpu=find_gpu,
    )


def _load_model_shape(config: Path) -> ModelShape | None:
    """Read the model's shape; None, and routing without a cost model, if its config.json uses other field names."""
    try:
        return read_model_shape(read_model_config(config).fields)
    except KeyError:
        return None
