"""Measure couriers between two nodes of a strict lab: `python -m bench.node_couriers`.

Every node has its own /dev/shm there. MPI is measured by the way that it finds, which is memory again, as the nodes are
one machine, and over sockets, as on a cluster with a plain network; gloo always uses sockets. Couriers are measured in
turns with raw broadcasts, which are another step of the same job; the best round of each counts. Needs root and a
Slurm, as `hpcrl lab up --strict` does.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from bench.couriers import BAR_NODES, ROUNDS_A_TURN, SIZES
from bench.figures import Figure, main
from bench.weights import qwen2_shapes
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.lab import lab as labs
from hpcrl.lab.conf import STRICT_CLUSTER
from hpcrl.testing.event_lines import read_events
from hpcrl.testing.nodes import wait_until
from hpcrl.weights.layout import TensorLayout

NODES = ("env1", "env2")
Wire = Literal["mpi", "tcp"]


@dataclass(frozen=True, kw_only=True)
class CourierWay:
    """A way by which couriers send, and the raw ways to compare it with, the one with a checksum last."""

    name: str
    wire: Wire
    raw: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    bar: float | None = None


IBCASTS = ("shared-Ibcast16", "shared-Ibcast64", "shared-summed-Ibcast16")
WAYS = (
    CourierWay(name="MPI", wire="mpi", raw=IBCASTS, bar=BAR_NODES),
    CourierWay(name="MPI over sockets", wire="mpi", raw=IBCASTS, environ={"UCX_TLS": "tcp,self"}, bar=BAR_NODES),
    CourierWay(name="gloo", wire="tcp", raw=("gloo", "summed-gloo")),
)


def measure(full: bool) -> list[Figure]:
    """Run all measurements; `--full` takes six turns in place of two."""
    return [figure for way in WAYS for figure in measure_way(way, num_turns=6 if full else 2)]


def measure_way(way: CourierWay, *, num_turns: int) -> list[Figure]:
    """Measure one way in a new lab: nodes have memory for one window."""
    hidden, inner, kv, num_layers = SIZES["512 MiB"]
    shapes = qwen2_shapes(hidden=hidden, inner=inner, kv=kv, num_layers=num_layers)
    layout = TensorLayout.pack((name, "bfloat16", shape) for name, shape in shapes.items())
    raw: dict[str, list[float]] = {name: [] for name in way.raw}
    walls: list[float] = []
    with running_job(way.environ) as job, job.running_couriers(way.wire, layout) as couriers:
        couriers.carry(1)  # creates the windows
        for _ in range(num_turns):
            for name, seconds in job.measure_raw(layout.nbytes, way.raw).items():
                raw[name].append(seconds)
            walls += couriers.carry(ROUNDS_A_TURN)
    *plain, summed = (min(seconds) for seconds in raw.values())
    best = min(plain)
    peer = "raw broadcast" if way.wire == "tcp" else "raw chunked Ibcast"
    return [
        Figure(name=f"{way.name}: couriers, checked / {peer}", value=min(walls) / best, bar=way.bar, better="lower"),
        Figure(name=f"{way.name}: the same, median of couriers", value=median(walls) / best, better="lower"),
        Figure(name=f"{way.name}: {peer}, then one xxh3 of it / without", value=summed / best, better="lower"),
        Figure(name=f"{way.name}: {peer}", value=layout.nbytes / best / 1e9, unit="GB/s"),
    ]


@contextmanager
def running_job(changes: dict[str, str]) -> Iterator["TwoNodeJob"]:
    """Yield a job on two nodes of a lab, with changes of its environment; nothing is left of it afterwards."""
    home = Path(tempfile.mkdtemp(prefix="hpcrl-", dir="/tmp"))  # short, for names of sockets
    lab = home / "lab"
    try:
        labs.up(lab, cluster=replace(STRICT_CLUSTER, shared=(str(home),)))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        environ |= labs.make_environment(lab) | changes
        words = ["salloc", "--no-shell", f"--nodelist={','.join(NODES)}", "--partition=env", "--exclusive"]
        granted = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        number = granted.stderr.partition("allocation ")[2].split()[0]
        yield TwoNodeJob(home=home, number=number, environ=environ)
    finally:
        labs.down(lab)
        shutil.rmtree(home, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class TwoNodeJob:
    """An allocation of two nodes."""

    home: Path
    number: str
    environ: dict[str, str]

    def step_words(self, *words: str, nodes: Sequence[str] = NODES, mpi: str = "none") -> list[str]:
        """Return the command of a step with a process on each of the nodes."""
        step = ["srun", f"--jobid={self.number}", "--overlap", "--ntasks-per-node=1", f"--ntasks={len(nodes)}"]
        step += [f"--nodelist={','.join(nodes)}", f"--mpi={mpi}", "--mem=0", "--cpus-per-task=2"]
        return [*step, sys.executable, "-m", *words]

    def measure_raw(self, nbytes: int, ways: Sequence[str]) -> dict[str, float]:
        """Return the seconds of the fastest round of each way."""
        words = self.step_words("bench.peers.broadcast", str(nbytes), str(ROUNDS_A_TURN), *ways, mpi="pmi2")
        done = subprocess.run(words, env=self.environ, stdout=subprocess.PIPE, check=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found

    @contextmanager
    def running_couriers(self, wire: Wire, layout: TensorLayout) -> Iterator["CourierPair"]:
        """Yield couriers that serve, and the trainer's window on the first node."""
        campaign = CampaignDir(self.home / wire)
        for folder in (campaign.events, campaign.weights, campaign.job(0).logs):
            folder.mkdir(parents=True, mode=0o700)
        words = ["hpcrl.weights.couriers", str(campaign.root), "0", ",".join(NODES), NODES[0]]
        words += [f"--wire={wire}", "--interface=lo", "--incarnation=1", "--silent-s=30", "--codec=full"]
        courier_words = self.step_words(*words, mpi="pmi2" if wire == "mpi" else "none")
        trainer_words = self.step_words("bench.peers.publisher", str(campaign.root), NODES[0], nodes=NODES[:1])
        with (
            campaign.job(0).log("couriers").open("wb") as log,
            subprocess.Popen(courier_words, env=self.environ, stdin=subprocess.DEVNULL, stderr=log) as step,
            subprocess.Popen(trainer_words, env=self.environ, stdin=subprocess.PIPE) as trainer,
        ):
            assert trainer.stdin is not None
            trainer.stdin.write(msgspec.json.encode(layout) + b"\n")
            try:
                yield CourierPair(campaign=campaign, step=step, trainer=trainer)
            finally:
                trainer.stdin.close()
                step.terminate()


@dataclass
class CourierPair:
    """The couriers of two nodes, and the trainer's process."""

    campaign: CampaignDir
    step: "subprocess.Popen[bytes]"
    trainer: "subprocess.Popen[bytes]"
    newest: int = 0

    def carry(self, num_versions: int) -> list[float]:
        """Publish versions, one after the other; return how long the couriers took for each."""
        assert self.trainer.stdin is not None
        for _ in range(num_versions):
            self.newest += 1
            self.trainer.stdin.write(b"%d\n" % self.newest)
            self.trainer.stdin.flush()
            wait_until(lambda: len(self._list_transfers()) >= self.newest or not self._runs(), what="it has arrived")
            assert self._runs(), self.campaign.job(0).log("couriers").read_text()
        return [event["wall_s"] for event in self._list_transfers()[-num_versions:]]

    def _list_transfers(self) -> list[dict[str, Any]]:
        return [event for event in read_events(self.campaign.events) if event["event"] == "courier"]

    def _runs(self) -> bool:
        return self.step.poll() is None and self.trainer.poll() is None


if __name__ == "__main__":
    sys.exit(main("node_couriers", measure))
