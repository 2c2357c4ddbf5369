"""Name every file and directory of a campaign that more than one module uses.

What is below a directory of one owner (a version in weights/, a segment in spools/) is named by that owner.

CAMPAIGN/
  campaign.json            name, site, created: written once, last; a directory without it is no campaign
  recipe.json site.json    what was asked, resolved
  plan.json
  stop                     present: somebody asked the campaign to stop
  settled.json             how far the trainer is: what bounds how far env workers may be ahead
  flips.json               workers that do the other role's work for now
  jobs/000/                one Slurm job (or local run)
    job.sh                 its script, where submitit did not make one under its id (ID_submission.sh)
    submitted.json         its id: what may be cancelled
    chain_marker           present: the job before queued this one; how many may still come after it
    outcome.json           how its driver ended
    drain end dump-stacks  present: asked to drain, to end every step, to write what each worker is doing
    logs/ parsl/           one log a worker; parsl's own files
    windows reward-jobs    shared memory to be removed, and reward jobs to be cancelled, after this job
    ranks-0.json           where the ranks of one start of the trainer meet
    couriers-LIFE.json meetings/LIFE  status of the couriers, and where they find each other over TCP
    kv/                    KV from prefill to decode engines, where they have nothing faster
  events/                  JSON lines, one file a process
  endpoints/               one file an engine worker, 0600 (holds its token)
  model/                   architecture and tokenizer, as transformers reads them
  task-blocks/             one file a block of task numbers that an env worker reserved, as 0-3
    0-under-way.jsonl      the groups that env worker 0 has under way
    0-word.json            how far training may go without making these too old
  spools/rollouts|scored|archive/  trajectories: as played, with rewards, and those that training is done with
  weights/                 versions of the weights
  evaluations/             what was measured on held-out tasks
  metrics/                 the events' figures for TensorBoard and the like, where the recipe asks for it
  checkpoints/             trainer state and what it consumed
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

SpoolName = Literal["rollouts", "scored", "archive"]
SPOOLS: tuple[SpoolName, ...] = get_args(SpoolName)


@dataclass(frozen=True)
class CampaignDir:
    """The directory of one campaign."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def manifest(self) -> Path:
        return self.root / "campaign.json"

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.json"

    @property
    def site(self) -> Path:
        return self.root / "site.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def stop(self) -> Path:
        return self.root / "stop"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"

    @property
    def switched_roles(self) -> Path:
        """Workers that do the other role's work for now."""
        return self.root / "flips.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def settled(self) -> Path:
        return self.root / "settled.json"

    @property
    def task_blocks(self) -> Path:
        return self.root / "task-blocks"

    def journal(self, env_index: int) -> Path:
        """What env host `env_index` has under way, whatever job it runs in."""
        return self.root / "task-blocks" / f"{env_index}-under-way.jsonl"

    def hold(self, env_index: int) -> Path:
        """How far training may go without making too old what env host `env_index` has under way."""
        return self.root / "task-blocks" / f"{env_index}-word.json"

    def holds(self) -> list[Path]:
        """Those of all env hosts."""
        return sorted(self.task_blocks.glob("*-word.json"))

    def spool(self, name: str) -> Path:
        return self.root / "spools" / name

    def job(self, number: int) -> "JobDir":
        return JobDir(self.jobs / f"{number:03d}")

    def job_numbers(self) -> list[int]:
        """Numbers of the jobs that exist, oldest first."""
        if not self.jobs.is_dir():
            return []
        return sorted(int(path.name) for path in self.jobs.iterdir() if path.name.isdigit())


@dataclass(frozen=True)
class JobDir:
    """The directory of one job of a campaign."""

    root: Path

    @property
    def number(self) -> int:
        return int(self.root.name)

    @property
    def script(self) -> Path:
        return self.root / "job.sh"

    @property
    def submission(self) -> Path:
        """The recorded id: what may be cancelled, and nothing else."""
        return self.root / "submitted.json"

    @property
    def chain_marker(self) -> Path:
        """Present: the job before queued this one, and not a person; how many may still come after it."""
        return self.root / "follows"

    @property
    def outcome(self) -> Path:
        """How the driver ended; absent while it runs or when it was killed."""
        return self.root / "outcome.json"

    @property
    def drain(self) -> Path:
        """Present: finish what is begun, checkpoint, end."""
        return self.root / "drain"

    @property
    def end(self) -> Path:
        """Present: every step ends what it runs, on whatever node that is."""
        return self.root / "end"

    @property
    def dump_stacks(self) -> Path:
        """Present: every worker writes what it is doing to its log."""
        return self.root / "dump-stacks"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def windows(self) -> Path:
        """Names of the shared memory that processes of this job made, so that it can be removed after them."""
        return self.root / "windows"

    @property
    def reward_jobs(self) -> Path:
        """Ids of the reward jobs that this job began, a line each: what may be cancelled after it."""
        return self.root / "reward-jobs"

    @property
    def kv(self) -> Path:
        """KV on its way from prefill to decode engines, where they have nothing faster."""
        return self.root / "kv"

    def ranks(self, start: int) -> Path:
        """Where the ranks of a start of the trainer meet."""
        return self.root / f"ranks-{start}.json"

    def courier_status(self, incarnation: str) -> Path:
        """What the couriers of one life say of themselves; one that is slow to end disturbs no later life."""
        return self.root / f"couriers-{incarnation}.json"

    def meeting(self, incarnation: str) -> Path:
        """Where the couriers of one life find each other when they go over TCP."""
        return self.root / "meetings" / incarnation

    @property
    def parsl(self) -> Path:
        return self.root / "parsl"

    def log(self, worker: str) -> Path:
        return self.logs / f"{worker}.log"
