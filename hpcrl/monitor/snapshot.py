"""A campaign at one moment: the JSON contract of `hpcrl monitor --json`, and what only the view shows beside it."""

import msgspec

from hpcrl.monitor.fold import Note
from hpcrl.monitor.state import State
from hpcrl.monitor.vocabulary import Step


class ComponentView(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    partition: str
    state: str
    nodes: list[str]
    roles: list[str]


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    id: str
    """Slurm's id (of the leader), or `local-<pid>`."""
    state: str
    reason: str
    components: list[ComponentView]


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    workers: int
    """Planned, or seen where there are more."""
    alive: int


class EpisodesView(msgspec.Struct, frozen=True, kw_only=True):
    done: int
    """Ended by themselves or cut at a limit: what is trained on."""
    aborted: int
    faulted: int
    running: int


class DomainView(msgspec.Struct, frozen=True, kw_only=True):
    """What the trajectories of one domain have earned, also those that were not trained on."""

    scored: int
    reward_mean: float | None
    """Of all of them."""
    reward_recent: float | None
    """Of the last 256."""


class EvaluationView(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on held-out tasks."""

    version: int
    """The newest weights when it began."""
    reward_mean: float | None
    """None: no episode could be scored."""
    num_episodes: int


class SpoolView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    depth: int
    """Trajectories that are durable and that the next stage has not consumed."""


class RoleDetail(msgspec.Struct, frozen=True, kw_only=True):
    partitions: list[str]
    nodes: list[str]


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What the view shows besides the contract."""

    now: float
    reason: str = ""
    """Why the campaign is in its state, if there is something to say."""
    job_id: str = ""
    elapsed_s: float | None = None
    """Of the newest job that has started."""
    left_s: float | None = None
    """Until the end of its allocation."""
    start_estimate: float | None = None
    """When Slurm thinks that a queued job starts."""
    last_step: Step | None = None
    engine_versions: list[int] = []
    """Versions that the engine workers serve now: oldest and newest."""
    num_tokens: int = 0
    remote_prefill_share: float | None = None
    roles: dict[str, RoleDetail] = {}
    notes: list[Note] = []
    """What happened of late, oldest first."""
    num_notes: int = 0
    """Since the beginning; those before the ones in `notes` are forgotten."""
    problems: list[str] = []
    """What could not be read or asked."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A campaign at one moment."""

    name: str
    state: State
    recipe: str | None
    site: str | None
    created: float | str | None
    jobs: list[JobView]
    roles: dict[str, RoleView]
    version: int
    """The newest version of the weights."""
    step: int
    """The newest training step."""
    num_steps: int | None
    """How many the recipe asks for."""
    episodes: EpisodesView
    accounts: dict[str, int]
    """How the episodes that have ended did so; they sum to those of `episodes` that do not run."""
    domains: dict[str, DomainView]
    reward_mean: list[float | None]
    """One per step; a step that was repeated after a resume counts as it was done last."""
    evaluations: list[EvaluationView]
    """In the order in which they were made."""
    tokens_per_s: float
    """Generated: over the last minute while a job runs, else over all the time that jobs ran."""
    spools: list[SpoolView]
    detail: Detail


def to_json(snapshot: Snapshot) -> bytes:
    """The contract, without what only the view shows."""
    fields = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__ if name != "detail"}
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"
