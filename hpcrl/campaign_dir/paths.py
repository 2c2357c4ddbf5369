"""The paths of all files and directories of a campaign that more than one module uses.

    CampaignDir    the directory of a campaign
    JobDir         the directory of one of its jobs
    JudgeDir       the directory of one of its judges
    SpoolName, SPOOLS    its spools
    make_worker_name     the name of a worker in events, endpoints, logs and spools
    parse_job            the job in it
    drop_job             the same without the job
    parse_role           the role in it

Files below a directory of one owner (a version in weights/, a segment in spools/) are named by that owner.

CAMPAIGN/
    campaign.json: name, site, created, changes; written last; a directory without it is not a campaign
    recipe.json, site.json, plan.json: the request with all its settings, and the numbers chosen for it
    steps/: what the steps of each partition start with
    stop: present when the campaign has been asked to stop
    settled.json: progress of the trainer, which limits how far env workers may be ahead
    train-progress.json: progress of the trainer in its present job, by which the driver finds a stall
    train-limits.json: lower limits of the trainer's micro-batches and rows, since memory ran out
    leases/000000: the drivers that may run the campaign, one after the other (hpcrl.campaign_dir.campaign_lease)
    switched-roles.json: workers that do the other role's work for now
    jobs/000/: one Slurm job (or local run)
        job.sh: its script, unless submitit made one under its id (ID_submission.sh)
        BLOCK.sh: the scripts of its reward jobs
        component-1.sh, component-jobs, component-1.json: in the layout "multi-job" the script of a component's job, the
            ids of all of them, and the nodes of one that has started
        submitted.json: its id, the only one that may be cancelled
        unanswered: present when Slurm may have queued it without an answer to its submission
        follows: present when the previous job queued this one; the number of jobs that may still follow it
        outcome.json: how its driver ended
        drain, end, dump-stacks: present to request draining, the end of every step, stack dumps of each worker
        logs/, parsl/: one log a worker; files of parsl
        terminated, term-answer: the node of a step that received SIGTERM; the driver's answer
        end-trainer-0: present to request the end of one start of the trainer
        windows, reward-jobs: shared memory to be removed, and reward jobs to be cancelled, after this job
        wakeups/: an empty file for each process that others wake; its name is the address (hpcrl.system.wakeups)
        engine-groups/: where the parts of engines over several nodes meet
        ranks-0.json: the address where the ranks of one start of the trainer meet
        couriers-INCARNATION.json, meetings/INCARNATION: status of the couriers, and their addresses for TCP
    events/: JSON lines, one file a process (hpcrl.campaign_dir.event_log)
    endpoints/: one file an engine worker, 0600 (it contains the token)
    tls.pem: the key and the certificate of these servers, 0600, where the site asks for TLS
    judges/NAME/: endpoints/ of a judge's engines, as above, and its model/ if that is tiny
    model/: architecture and tokenizer, in the format of transformers
    tasks/: the rows of each domain's task set, and where each row is
    warmup/: the conversations of the warm-up
    env-workers/: what env workers keep from one job to the next
        0-tasks.jsonl: the tasks that env worker 0 has drawn, and those whose groups are not durable yet
        0-hold.json: the version up to which training may go without making these too old
    spools/rollouts|scored|archive/: trajectories as played, with rewards, and after training
    weights/: versions of the weights
    evaluations/: results on held-out tasks
    metrics/: figures for TensorBoard and the like, if the recipe enables it
    checkpoints/: trainer state and the trajectories consumed
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

SpoolName = Literal["rollouts", "scored", "archive"]
SPOOLS: tuple[SpoolName, ...] = get_args(SpoolName)


def make_worker_name(job: int, *parts: str | int) -> str:
    """Return the name of a process of a job, such as 000-env-1."""
    return "-".join(map(str, (f"{job:03d}", *parts)))


def parse_job(worker: str) -> str:
    """Return the job in the full name of a process, such as 000."""
    return worker.partition("-")[0]


def drop_job(worker: str) -> str:
    """Return the name of a worker without its job."""
    return worker.partition("-")[2] or worker


def parse_role(worker: str) -> str:
    """Return the role in the full name of a worker; "" if the name has none."""
    return drop_job(worker).rpartition("-")[0]


def parse_index(worker: str) -> int:
    """Return the index in the name of a worker, with or without its job; -1 if the name has none."""
    index = worker.rpartition("-")[2]
    return int(index) if index.isdecimal() else -1


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
    def steps(self) -> Path:
        """The scripts with which steps start, by partition."""
        return self.root / "steps"

    @property
    def stop(self) -> Path:
        return self.root / "stop"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def leases(self) -> Path:
        """The leases of its drivers, the last of which may run."""
        return self.root / "leases"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"

    @property
    def certificate(self) -> Path:
        """The key and the certificate of servers that other nodes reach, where the site asks for TLS."""
        return self.root / "tls.pem"

    @property
    def switched_roles(self) -> Path:
        """The workers that do the other role's work for now."""
        return self.root / "switched-roles.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def has_results(self) -> bool:
        """Return whether a job has left checkpoints or trajectories."""
        folders = (self.checkpoints, *map(self.spool, SPOOLS))
        return any(map(_has_files, folders))

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
    def env_workers(self) -> Path:
        """The files of env workers that last from one job to the next."""
        return self.root / "env-workers"

    @property
    def tasks(self) -> Path:
        """The rows of the domains' task sets."""
        return self.root / "tasks"

    @property
    def warmup(self) -> Path:
        """The conversations of a warm-up."""
        return self.root / "warmup"

    @property
    def train_progress(self) -> Path:
        """The progress of the trainer in its present job, by which the driver finds a stall."""
        return self.root / "train-progress.json"

    @property
    def train_limits(self) -> Path:
        """The lower limits of a trainer that ran out of memory."""
        return self.root / "train-limits.json"

    def journal(self, env_index: int) -> Path:
        """Return the file of the tasks of env worker `env_index`, whatever job it runs in."""
        return self.env_workers / f"{env_index}-tasks.jsonl"

    def hold(self, env_index: int) -> Path:
        """Return the file of the version up to which env worker `env_index`'s running groups stay fresh enough."""
        return self.env_workers / f"{env_index}-hold.json"

    def holds(self) -> list[Path]:
        """Return the hold files of all env workers."""
        return sorted(self.env_workers.glob("*-hold.json"))

    def judge(self, name: str) -> "JudgeDir":
        return JudgeDir(self.root / "judges" / name)

    @property
    def spools(self) -> Path:
        return self.root / "spools"

    def spool(self, name: str) -> Path:
        return self.spools / name

    def job(self, number: int) -> "JobDir":
        return JobDir(self.jobs / make_worker_name(number))

    def job_numbers(self) -> list[int]:
        """Return the numbers of the jobs that exist, oldest first."""
        if not self.jobs.is_dir():
            return []
        return sorted(int(path.name) for path in self.jobs.iterdir() if path.name.isdigit())


def _has_files(folder: Path) -> bool:
    """Return whether a directory has files that are not hidden; one that cannot be read shows none."""
    try:
        with os.scandir(folder) as entries:
            return any(not entry.name.startswith(".") for entry in entries)
    except OSError:
        return False


@dataclass(frozen=True)
class JudgeDir:
    """The directory of one judge of a campaign."""

    root: Path

    @property
    def model(self) -> Path:
        """The model of a judge that is tiny; others are used where they are."""
        return self.root / "model"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"


_RANKS_NAME = "ranks-{}.json"
_LEASE_NAME = "component-{}.json"
_TRAINER_END_NAME = "end-trainer-{}"


@dataclass(frozen=True)
class JobDir:
    """The directory of one job of a campaign."""

    root: Path

    @property
    def campaign(self) -> CampaignDir:
        return CampaignDir(self.root.parents[1])

    @property
    def number(self) -> int:
        return int(self.root.name)

    @property
    def next_job(self) -> "JobDir":
        return self.campaign.job(self.number + 1)

    @property
    def script(self) -> Path:
        return self.root / "job.sh"

    def block_script(self, block: str) -> Path:
        """Return the script of a block of Parsl that is a job of its own."""
        return self.root / f"{block}.sh"

    def component_script(self, index: int) -> Path:
        """Return the script of the job of a component."""
        return self.root / f"component-{index}.sh"

    def component_lease(self, index: int) -> Path:
        """Return the record of the nodes that the job of a component has, from its start to its end."""
        return self.root / _LEASE_NAME.format(index)

    def list_leases(self) -> list[Path]:
        """List the leases of components whose jobs run."""
        return list(self.root.glob(_LEASE_NAME.format("*")))

    @property
    def component_jobs(self) -> Path:
        """The ids of the jobs of components 1, 2, ..., a line each."""
        return self.root / "component-jobs"

    @property
    def submission(self) -> Path:
        """The recorded id, the only one that may be cancelled."""
        return self.root / "submitted.json"

    @property
    def unanswered(self) -> Path:
        """The mark of a job that Slurm may have queued without an answer: one process may take it over."""
        return self.root / "unanswered"

    @property
    def chain_marker(self) -> Path:
        """The mark of a job that the previous one queued, not a user; it holds the number of jobs that may follow."""
        return self.root / "follows"

    @property
    def outcome(self) -> Path:
        """The outcome of the driver; absent while it runs or if it was killed."""
        return self.root / "outcome.json"

    @property
    def drain(self) -> Path:
        """The request to finish what is started, checkpoint and end, by its presence."""
        return self.root / "drain"

    @property
    def end(self) -> Path:
        """The request to every step to end its processes, on every node."""
        return self.root / "end"

    @property
    def terminated(self) -> Path:
        """The notice of a step that received SIGTERM: Slurm may send the driver none, or a later one. Empty before.

        It and the answer are there from the start: a network file system believes for a while that a file is
        absent which it did not find once.
        """
        return self.root / "terminated"

    @property
    def term_answer(self) -> Path:
        """The answer to that notice, of a driver that may have to wait for Slurm before it drains. Empty before."""
        return self.root / "term-answer"

    @property
    def dump_stacks(self) -> Path:
        """The request to every worker to write its stacks to its log."""
        return self.root / "dump-stacks"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def windows(self) -> Path:
        """The names of shared memory that processes of this job created, to be removed after them."""
        return self.root / "windows"

    @property
    def reward_jobs(self) -> Path:
        """The ids of the reward jobs that this job submitted, a line each, to be cancelled after it."""
        return self.root / "reward-jobs"

    @property
    def engine_groups(self) -> Path:
        """The meetings of the parts of engines over several nodes, and the answers of their ranks."""
        return self.root / "engine-groups"

    @property
    def wakeups(self) -> Path:
        """The addresses of the processes that others wake when there is something new for them."""
        return self.root / "wakeups"

    def ranks(self, start: int) -> Path:
        """Return the file where the ranks of one start of the trainer meet."""
        return self.root / _RANKS_NAME.format(start)

    def trainer_end(self, start: int) -> Path:
        """Return the request to the steps of one start of the trainer to end; another start follows."""
        return self.root / _TRAINER_END_NAME.format(start)

    def list_messages(self) -> list[Path]:
        """List what the processes of one run of this job leave for each other: another run must not read it."""
        starts = [path for name in (_RANKS_NAME, _TRAINER_END_NAME) for path in self.root.glob(name.format("*"))]
        own = [self.drain, self.end, self.terminated, self.term_answer, self.outcome, self.dump_stacks, self.wakeups]
        return [*own, *starts]

    def courier_status(self, incarnation: str) -> Path:
        """Return the status file of one incarnation of the couriers, so that an old one cannot overwrite it."""
        return self.root / f"couriers-{incarnation}.json"

    def meeting(self, incarnation: str) -> Path:
        """Return the directory where one incarnation of the couriers finds its peers for TCP."""
        return self.root / "meetings" / incarnation

    @property
    def parsl(self) -> Path:
        return self.root / "parsl"

    def log(self, worker: str) -> Path:
        return self.logs / f"{worker}.log"
