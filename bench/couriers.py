"""Measure couriers over MPI against MPI itself, and through random kills: `python -m bench.couriers`.

two_nodes      from one window into another, checked, against raw chunked broadcasts of the same bytes
two_sources    half of every tensor from each of two nodes of the trainer, against all of it from one
one_node       readers that map one window, checked, against a copy for each reader by other means
random_kills   50 versions while couriers are killed at random: the versions that engines read, and the last one
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import Figure, main
from bench.weights import NUM_READERS, SPAWN, qwen2_shapes, random_bfloat16, readers, scratch_run
from hpcrl.errors import WeightsError
from hpcrl.testing.nodes import MPIEXEC, CourierFleet, fleet, publish, wait_until
from hpcrl.testing.shards import split_tensor
from hpcrl.weights.layout import PartAssignment, TensorLayout
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window

BAR_NODES = 1.1
BAR_BCAST = 3.0
NUM_VERSIONS = 50
KILL_SHARE = 0.4
RAW_WAYS = ("Ibcast16", "Ibcast64", "shared-Ibcast16", "shared-Ibcast64", "shared-summed-Ibcast16")
ROUNDS_A_TURN = 4
SIZES = {"512 MiB": (896, 4864, 128, 9), "2 GiB": (1536, 8960, 256, 18)}


def measure(full: bool) -> list[Figure]:
    """Run all measurements; `--full` adds 2 GiB."""
    figures = []
    for size in list(SIZES)[: 2 if full else 1]:
        hidden, inner, kv, num_layers = SIZES[size]
        shapes = qwen2_shapes(hidden=hidden, inner=inner, kv=kv, num_layers=num_layers)
        figures += two_nodes(size, shapes, turns=4) + one_node(size, shapes, rounds=8)
        if size == "512 MiB":  # with 2 GiB, five windows and their source tensors would not fit into memory
            figures += two_sources(size, shapes, turns=3)
    return figures + random_kills()


def two_nodes(size: str, shapes: dict[str, Any], *, turns: int) -> list[Figure]:
    """Measure raw broadcasts and couriers in turns, a few rounds each; the best round of each counts.

    Windows are created with the first version, which does not count: after it the same memory is written again and
    again, as in a campaign, and so is the memory of the raw broadcast.
    """
    layout = TensorLayout.pack((name, "bfloat16", shape) for name, shape in shapes.items())
    raw: dict[str, list[float]] = {way: [] for way in RAW_WAYS}
    visible: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder,
        fleet(Path(folder) / "c", "n0", "n1") as couriers,
    ):
        couriers.start()
        window = couriers.trainer(layout)
        carry(couriers, [window], num_versions=1)
        for _ in range(turns):
            for way, seconds in peers(2, layout.nbytes, ROUNDS_A_TURN, *RAW_WAYS).items():
                raw[way].append(seconds)
            visible += carry(couriers, [window], num_versions=ROUNDS_A_TURN)
        walls = [event["wall_s"] for event in couriers.events("courier")][1:]
        idle = idle_share(couriers)
    fastest = {way: min(seconds) for way, seconds in raw.items()}
    best = min(fastest["shared-Ibcast16"], fastest["shared-Ibcast64"])
    summed, private = fastest["shared-summed-Ibcast16"], min(fastest["Ibcast16"], fastest["Ibcast64"])
    return [
        Figure(
            name=f"{size}: two nodes, checked / raw chunked Ibcast between shared memories",
            value=min(walls) / best,
            bar=BAR_NODES,
            better="lower",
        ),
        Figure(name=f"{size}: the same, median of all / that best", value=median(walls) / best, better="lower"),
        Figure(name=f"{size}: the same, seen by an engine", value=min(visible) / best, better="lower"),
        Figure(name=f"{size}: raw chunked Ibcast, then one xxh3 of it / without", value=summed / best, better="lower"),
        Figure(name=f"{size}: two nodes / raw Ibcast, huge private pages", value=min(walls) / private, better="lower"),
        Figure(
            name=f"{size}: raw chunked Ibcast between shared memories", value=layout.nbytes / best / 1e9, unit="GB/s"
        ),
        Figure(name="an idle courier's share of a core", value=idle, bar=0.05, better="lower"),
    ]


def two_sources(size: str, shapes: dict[str, Any], *, turns: int) -> list[Figure]:
    """Measure one receiver with two sources and with one, in turns, for the same bytes; the best of each counts."""
    layout = TensorLayout.pack((name, "bfloat16", shape) for name, shape in shapes.items())
    halves = [split_tensor(tensor, axis=0, num_shards=2) for tensor in layout.tensors]
    parts = PartAssignment.from_shards(
        layout, nodes=("n0", "n1"), held_by_rank=[[half[rank] for half in halves] for rank in range(2)]
    )
    with (
        tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder,
        fleet(Path(folder) / "one", "n0", "n1") as one,
        fleet(Path(folder) / "two", "n0", "n1", "n2", num_sources=2) as two,
    ):
        one.start()
        two.start()
        from_one = [one.trainer(layout)]
        from_two = [two.trainer(parts.layouts[node], node=number) for number, node in enumerate(two.sources)]
        for _ in range(turns):
            for couriers, windows in ((one, from_one), (two, from_two)):
                carry(couriers, windows, num_versions=ROUNDS_A_TURN)
        best, both = (min(event["wall_s"] for event in couriers.events("courier")[1:]) for couriers in (one, two))
    return [Figure(name=f"{size}: half from each of two sources / all from one", value=both / best, better="lower")]


def carry(couriers: CourierFleet, windows: list[Window], *, num_versions: int) -> list[float]:
    """Publish versions; return the time until an engine on the last node could load each."""
    key = couriers.key(couriers.nodes[-1])
    there = Window.open(key, job=0)
    newest, took = windows[0].newest(), []
    first = 1 if newest is None else newest.version + 1
    for version in range(first, first + num_versions):
        for window in windows:
            publish(window, version)
        start = time.perf_counter()
        while there is None or (seen := there.newest()) is None or seen.version != version:
            assert couriers.alive(), couriers.account()
            there = there or Window.open(key, job=0)
            time.sleep(0.0005)
        took.append(time.perf_counter() - start)
    wait_until(lambda: carried(couriers) == version, what="every transfer was logged")
    if there is not None:
        there.close()
    return took


def carried(couriers: CourierFleet) -> int:
    """Return the newest version that was logged as being everywhere."""
    return max((int(event["version"]) for event in couriers.events("courier")), default=-1)


def one_node(size: str, shapes: dict[str, Any], *, rounds: int) -> list[Figure]:
    """Measure the fan-out to the same number of readers by every means; only ours check what they read."""
    tensors = random_bfloat16(shapes)
    totals = []
    with scratch_run() as campaign, readers(campaign) as pipes:
        store = WindowStore(WindowKey(campaign=campaign.root, node="bench"), job=campaign.job(0))
        for version in range(rounds + 1):
            start = time.perf_counter()
            store.commit(store.stage(tensors, WeightVersion(version=version, step=version)))
            totals.append(max(pipe.recv()[0] for pipe in pipes) - start)
        store.close()
    ours = min(totals[1:])
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    del tensors  # frees 2 GiB before five processes allocate the same each
    theirs = peers(NUM_READERS + 1, nbytes, rounds, "Bcast", "Ibcast16", "Ibcast64", "gloo", "safetensors")
    theirs["Ibcast"] = min(theirs.pop("Ibcast16"), theirs.pop("Ibcast64"))
    names = {
        "Bcast": "MPI.Bcast",
        "Ibcast": "raw chunked Ibcast",
        "gloo": "torch.distributed gloo broadcast",
        "safetensors": "safetensors through shared memory",
    }
    return [
        Figure(
            name=f"{size}: {name} / fan-out to {NUM_READERS} readers",
            value=theirs[way] / ours,
            bar=BAR_BCAST if way == "Bcast" else 1.0,
        )
        for way, name in names.items()
    ]


def peers(num_ranks: int, nbytes: int, rounds: int, *ways: str) -> dict[str, float]:
    """Return the seconds of each way. With more ranks than cores, MPICH is throttled, or ranks would only spin."""
    environment = dict(os.environ)
    if num_ranks > len(os.sched_getaffinity(0)):
        environment |= {
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
        }
    command = [str(MPIEXEC), "-n", str(num_ranks), sys.executable, "-m", "bench.peers.broadcast"]
    done = subprocess.run(
        [*command, str(nbytes), str(rounds), *ways], env=environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def idle_share(couriers: CourierFleet) -> float:
    """Return the share of a core that the busier courier uses while nothing is sent."""

    def used_s() -> dict[int, float]:
        stats = {
            pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in couriers.pids().values()
        }
        return {pid: (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") for pid, stat in stats.items()}

    before, start = used_s(), time.monotonic()
    time.sleep(3)
    after, wall_s = used_s(), time.monotonic() - start
    return max((after[pid] - before[pid]) / wall_s for pid in after)


# ---- kills


def random_kills() -> list[Figure]:
    """Test three nodes with an engine each: all it can read must be of one version, and versions never go back."""
    layout = TensorLayout.pack([(f"layers.{number}", "bfloat16", (1024, 2048)) for number in range(8)])
    chance = random.Random(0)
    num_kills = 0
    nodes = ("n0", "n1", "n2", "n3")
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder, fleet(Path(folder) / "c", *nodes) as couriers:
        engines = [Engine(couriers, node) for node in nodes[1:]]
        couriers.start()
        window = couriers.trainer(layout)
        for version in range(1, NUM_VERSIONS + 1):
            publish(window, version)
            time.sleep(chance.random() * 0.1)
            if chance.random() < KILL_SHARE:
                couriers.signal(chance.choice(nodes), 9)
                num_kills += 1
                couriers.wait_for_end()
                couriers.start()
        couriers.wait_for(NUM_VERSIONS)
        seen = [engine.end(last=NUM_VERSIONS) for engine in engines]
    return [
        Figure(
            name=f"engines of 3 at the last of {NUM_VERSIONS} versions",
            value=sum(s["last"] for s in seen),
            unit="",
            bar=3,
        ),
        Figure(
            name="mixed versions or steps back seen",
            value=sum(s["wrong"] for s in seen),
            unit="",
            bar=0,
            better="lower",
        ),
        Figure(name="couriers killed meanwhile", value=num_kills, unit=""),
        Figure(name="versions that an engine saw, fewest", value=min(s["num"] for s in seen), unit=""),
    ]


class Engine:
    """A process that reads every version that appears on its node."""

    def __init__(self, couriers: CourierFleet, node: str) -> None:
        self._pipe, there = SPAWN.Pipe()
        self._process = SPAWN.Process(target=look, args=(couriers.key(node), there), daemon=True)
        self._process.start()

    def end(self, *, last: int) -> dict[str, int]:
        """Return the counts of what it has read, after time to read the last version."""
        self._pipe.send(last)
        seen: dict[str, int] = self._pipe.recv()
        self._process.join()
        return seen


def look(key: WindowKey, pipe: Connection) -> None:
    """Run an engine: count versions, and those that are mixed or older than one before."""
    import numpy as np

    newest, num, wrong, last, deadline = -1, 0, 0, None, float("inf")
    window: Window | None = None
    while newest != last and time.monotonic() < deadline:
        if last is None and pipe.poll():
            last, deadline = pipe.recv(), time.monotonic() + 10
        if window is None or not window.is_current():
            window = Window.open(key, job=0)
        manifest = window.newest() if window is not None else None
        if window is None or manifest is None or manifest.version == newest:
            time.sleep(0.002)
            continue
        try:
            with window.read_version(manifest.version) as data:
                values = np.frombuffer(data, np.uint64)
                whole = bool((values == manifest.version).all())
                del values
        except WeightsError:  # it is being overwritten: a newer one is there
            continue
        wrong += not whole or manifest.version < newest
        newest, num = manifest.version, num + 1
    pipe.send({"last": int(newest == last), "wrong": wrong, "num": num})


if __name__ == "__main__":
    sys.exit(main("couriers", measure))
