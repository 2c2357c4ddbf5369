"""The space that a campaign needs where it is stored, and how that grows. Pure.

StorageForecast    checkpoints, versions, trajectories and logs: what is there at a time, and what each step adds
forecast_storage   that of a recipe
describe_storage   the line of a plan
warn_late_retirement  the warning of a plan, if trajectories wait too long for a checkpoint
judge_free_space   whether a campaign fits into the space that is free
"""

from math import inf
from typing import NamedTuple

from hpcrl.config.published_dtype import choose_published_dtype
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.hardware.architecture import read_architecture
from hpcrl.hardware.cost_model import TrainingWork, estimate_step_s, make_model_shape
from hpcrl.hardware.gpus import GpuModel
from hpcrl.hardware.memory_model import BYTES_FP32, GIB, compute_window_bytes
from hpcrl.hardware.train_memory import count_trained_params
from hpcrl.plan.demand import average_episode, count_episodes, count_published, make_rank_setup

DAY_S = 86400.0
TOKEN_BYTES, TEACHER_TOKEN_BYTES = 13, 4
"""The columns of a token: its id, log-prob, version and mask, and its log-prob under a teacher; experts come on top."""
TRAJECTORY_BYTES, TURN_BYTES = 400, 100
"""The facts of a trajectory, as of the quickstart: 718 bytes with 4.2 turns each."""
EVENT_BYTES = 60
"""The events of a trajectory, in those of its group, its segment and its step; likewise."""
LOG_BYTES_PER_WORKER_DAY = 10 << 20
"""The events that a worker reports as long as it runs are half of it, and its log is taken to be as long."""
MIN_DAYS = 1.0
"""Space that lasts for less than this is too little to start with."""
NUM_SPOOL_COPIES = 2
"""A trajectory is in "rollouts" and, with its reward, in "scored"."""


class StorageForecast(NamedTuple):
    """The space of a campaign, in GiB."""

    checkpoint_gib: float
    num_checkpoints: int
    """Checkpoints that are there at a time: those that are kept, and one that is being written."""
    milestones_gib: float
    """The weights of those that are kept as the best."""
    versions_gib: float
    trajectories_gib: float
    """The trajectories of one step."""
    num_steps: int
    num_waiting: int
    """The steps whose trajectories are in the spools: they wait for training, or for a checkpoint that covers them."""
    num_archived: int
    """The steps whose trajectories the archive has at the end."""
    logs_gib: float
    """Logs and events of a day."""
    steps_per_day: float | None
    """At the pace of the trainer's GPUs; None where it is not known."""

    @property
    def checkpoints_gib(self) -> float:
        return self.checkpoint_gib * self.num_checkpoints + self.milestones_gib

    @property
    def fixed_gib(self) -> float:
        """The space of what is replaced: checkpoints and versions of the weights."""
        return self.checkpoints_gib + self.versions_gib

    @property
    def spools_gib(self) -> float:
        return NUM_SPOOL_COPIES * self.num_waiting * self.trajectories_gib

    @property
    def archive_gib(self) -> float:
        return self.num_archived * self.trajectories_gib

    @property
    def gib(self) -> float:
        """The most at a time; without logs, which are small."""
        return self.fixed_gib + self.spools_gib + self.archive_gib

    def count_days(self, free_gib: float) -> float:
        """Return the days until `free_gib` are used up; infinite if the campaign fits, or its pace is not known."""
        if self.gib <= free_gib or self.steps_per_day is None:
            return inf
        left_gib = max(free_gib - self.fixed_gib, 0.0)
        num_waiting = min(left_gib / (NUM_SPOOL_COPIES * self.trajectories_gib), self.num_waiting)
        num_archived = max(left_gib - self.spools_gib, 0.0) / self.trajectories_gib
        return (num_waiting + num_archived) / self.steps_per_day

    def describe(self) -> str:
        """Describe the need to a person."""
        parts = [
            f"{self.num_checkpoints} checkpoints of {_show(self.checkpoint_gib)}",
            *([f"the weights of the best ({_show(self.milestones_gib)})"] if self.milestones_gib else []),
            f"versions of the weights ({_show(self.versions_gib)})",
            f"spools ({_show(self.spools_gib)})",
            f"an archive of {_show(self.archive_gib)} after {self.num_steps} steps",
        ]
        pace = (
            "" if self.steps_per_day is None else f", at most {_show(self.steps_per_day * self.trajectories_gib)} a day"
        )
        needed = f"{_show(self.gib)} for {', '.join(parts[:-1])} and {parts[-1]}{pace}"
        return f"{needed}, besides logs ({_show(self.logs_gib)} a day)"


def _show(gib: float) -> str:
    if gib >= 1024:
        return f"{gib / 1024:.1f} TiB"
    return f"{gib:.3g} GiB" if gib >= 0.1 or not gib else f"{gib * 1024:.2g} MiB"


def forecast_storage(recipe: Recipe, *, train_gpu: GpuModel | None = None) -> StorageForecast | None:
    """Forecast the space for a recipe whose trainer has such GPUs; None if the size of the model is not known."""
    shape, train, spool = recipe.model.architecture, recipe.train, recipe.spool
    if shape is None:
        return None
    setup = make_rank_setup(recipe, has_recompute=True)
    num_trained = count_trained_params(shape, setup)
    two_versions = compute_window_bytes(
        count_published(recipe) or 0, dtype=choose_published_dtype(recipe, recipe.model.config)
    )
    num_held_back = train.keep_checkpoints * train.checkpoint_every_steps + recipe.rollout.max_lag + 1
    num_workers = sum(recipe.role_resources(role).num_workers for role in recipe.planned_roles)
    num_waiting = min(train.num_steps, num_held_back)
    num_kept = {"all": train.num_steps, "versions": spool.archive_versions, "none": 0}[spool.keep]
    step_s = _estimate_step_s(recipe, train_gpu)
    return StorageForecast(
        checkpoint_gib=num_trained * setup.saved_bytes / GIB,
        num_checkpoints=train.keep_checkpoints + 1,
        milestones_gib=train.keep_best * num_trained * BYTES_FP32 / GIB,
        versions_gib=two_versions / 2 * train.keep_versions / GIB,
        trajectories_gib=_estimate_trajectory_bytes(recipe) * count_episodes(recipe) / GIB,
        num_steps=train.num_steps,
        num_waiting=num_waiting,
        num_archived=min(num_kept, train.num_steps - num_waiting),
        logs_gib=num_workers * LOG_BYTES_PER_WORKER_DAY / GIB,
        steps_per_day=None if step_s is None else DAY_S / step_s,
    )


def describe_storage(forecast: StorageForecast | None) -> list[str]:
    """Return the line of a plan."""
    return [] if forecast is None else [f"the campaign's directory has up to {forecast.describe()}"]


def warn_late_retirement(forecast: StorageForecast | None, recipe: Recipe) -> list[str]:
    """Warn if the trajectories that a checkpoint holds back need more space than the checkpoints."""
    if forecast is None or forecast.spools_gib <= forecast.checkpoints_gib:
        return []
    train = recipe.train
    return [
        f"trajectories stay in the spools until the last {train.keep_checkpoints} checkpoints cover them: those of "
        f"{forecast.num_waiting} steps are {_show(forecast.spools_gib)}, more than the checkpoints "
        f"({_show(forecast.checkpoints_gib)}): lower train.checkpoint_every_steps ({train.checkpoint_every_steps}) or "
        "train.keep_checkpoints"
    ]


def judge_free_space(forecast: StorageForecast, *, free_gib: float, place: str) -> str:
    """Return how long the free space of `place` lasts; raise ConfigError if that is less than a day."""
    days = forecast.count_days(free_gib)
    if forecast.gib <= free_gib:
        return f"{place}, and this campaign needs up to {_show(forecast.gib)}"
    if forecast.fixed_gib > free_gib or days < MIN_DAYS:
        lasts = "" if forecast.fixed_gib > free_gib else f", so it is full after {days * 24:.1f} hours"
        raise ConfigError(
            f"{place}, and this campaign needs up to {forecast.describe()}{lasts}: set site.campaigns_dir to a larger "
            "file system, lower train.keep_checkpoints, keep_best, keep_versions or checkpoint_every_steps, set "
            'spool.keep = "versions", or free space (`hpcrl gc`)'
        )
    lasts = f"for {days:.0f} days or more" if days < inf else "but not for all of it"
    return (
        f"{place}: room {lasts}, as this campaign needs up to {_show(forecast.gib)} with its archive of "
        f'{_show(forecast.archive_gib)}: set spool.keep = "versions", or use `hpcrl gc --archive` in time'
    )


def _estimate_trajectory_bytes(recipe: Recipe) -> float:
    num_turns, num_tokens = average_episode(recipe)
    each = TOKEN_BYTES + TEACHER_TOKEN_BYTES * (recipe.teaching_judge is not None)
    if recipe.train.router_replay and recipe.model.config:
        each += read_architecture(recipe.model.config).choice_bytes
    return TRAJECTORY_BYTES + EVENT_BYTES + num_turns * TURN_BYTES + num_tokens * each


def _estimate_step_s(recipe: Recipe, gpu: GpuModel | None) -> float | None:
    """Estimate a training step of all its GPUs, the least that the step of a campaign takes; None if unknown."""
    shape, resources = recipe.model.architecture, recipe.resources.train
    num_gpus = resources.num_workers * resources.gpus_per_worker
    _, num_tokens = average_episode(recipe)
    if gpu is None or gpu.bf16_tflops is None or shape is None or not num_gpus or not num_tokens:
        return None
    work = TrainingWork(
        num_tokens=count_episodes(recipe) * num_tokens * recipe.train.epochs, mean_length=num_tokens, num_gpus=num_gpus
    )
    return estimate_step_s(gpu, shape=make_model_shape(shape), work=work)
