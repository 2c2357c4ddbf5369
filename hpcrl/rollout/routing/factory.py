"""The router of an env host, as the recipe asks for it and the campaign's model allows."""

from collections.abc import Callable
from pathlib import Path

from hpcrl.campaign_dir.endpoints import Endpoint
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import RunDir
from hpcrl.config.recipe import Recipe
from hpcrl.engines.base import Engine
from hpcrl.hardware.cost_model import ModelShape, Pace, pace, shape_of
from hpcrl.hardware.gpus import GPUS
from hpcrl.models.model_config import read_model_config
from hpcrl.rollout.routing.role_switch import Flips
from hpcrl.rollout.routing.router import Router


def make_router(
    recipe: Recipe, run: RunDir, *, host: int, connect: Callable[[Endpoint], Engine], seed: int, events: EventLog
) -> Router:
    """The router of env host `host`; the first host decides which workers change over, where the recipe lets them."""
    shape = _shape(Path(recipe.engine.sim.config or run.model / "config.json"))

    def pace_of(endpoint: Endpoint) -> Pace | None:
        gpu = GPUS.get(endpoint.gpu or "")
        return pace(gpu, shape=shape, tp=max(1, endpoint.num_gpus)) if gpu and shape else None

    rules = recipe.router
    may_flip = rules.switch_roles or rules.sizing == "auto"
    return Router(
        run.endpoints,
        connect=connect,
        seed=seed,
        rules=rules,
        weights={name: domain.weight for name, domain in recipe.domains.items()},
        pace_of=pace_of,
        flips=Flips(run.flips, rules=rules, leads=host == 0) if may_flip else None,
        on_route=events.emit if rules.log_share else None,
    )


def _shape(config: Path) -> ModelShape | None:
    """The model's shape, unless its config.json has other words for it: then turns are counted and not reckoned."""
    try:
        return shape_of(read_model_config(config).fields)
    except KeyError:
        return None
