"""One process a node carries versions from the trainer's windows into the windows of all other nodes.

`python -m hpcrl.weights.couriers CAMPAIGN JOB NODES SOURCES`, as many ranks as NODES (a,b,c) has names; SOURCES are the
trainer's nodes, that of its rank 0 first. Ranks know each other by node. Nothing blocks in the wire: every transfer is
polled with naps, so that couriers leave the cores to others, hear each other meanwhile, and notice who is stuck.
Any failure ends the whole step; the driver starts it again, and the newest version is sent again.

    sender.py      the trainer's first node     contributor.py  its other nodes      receiver.py  all that are not its
    intake.py      what comes into a window     messages.py     how parts are cut
    link.py        what all stand on            mpi.py tcp.py   the wires (pmi.py: how MPI begins under Slurm)
    transfer.py    what they tell each other
"""

import argparse
import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, get_args

import msgspec

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.paths import RunDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.errors import WeightsError
from hpcrl.system.network import this_node
from hpcrl.system.processes import die_with_parent
from hpcrl.weights.couriers.codec_choice import Codec
from hpcrl.weights.couriers.link import Link, Wire
from hpcrl.weights.couriers.part_sender import Contributor
from hpcrl.weights.couriers.protocol import SILENT_S, NoRoomError, NoWorldError, Peer, Standing, StuckError, Watch
from hpcrl.weights.couriers.receiver import Receiver
from hpcrl.weights.couriers.sender import Sender
from hpcrl.weights.window.file import window_key

WATCHDOG_S = 90.0
"""How long it may take to bring all ranks together; some are late, since their node is slow to import what it needs."""
SLACK_S = 10.0
"""So much earlier a wire gives up that can."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a courier is told."""

    here: WorkerPlace
    nodes: tuple[str, ...]
    sources: tuple[str, ...]
    wire: str
    life: str
    codec: Codec
    interface: str | None
    silent_s: float

    def sees(self, node: str) -> bool:
        """The first source hears everybody, and everybody it."""
        return (node == self.sources[0]) != (self.here.node == self.sources[0])


def main() -> NoReturn:
    """Be one rank of the couriers' step until the driver ends it."""
    die_with_parent(signal.SIGKILL)  # one that was stopped has to end with its step too
    faulthandler.enable()
    place = _place(sys.argv[1:])
    name = f"{place.here.job.number:03d}-courier-{place.here.node}"
    path = place.here.campaign.events / f"{name}.jsonl"
    events = EventLog(path, job=place.here.job.number, role="courier", worker=name, node=place.here.node)
    try:
        _serve(place, events)
    except WeightsError as error:
        fault = FaultReported(what="courier", detail=str(error))
        if isinstance(error, StuckError):
            fault = msgspec.structs.replace(
                fault, rank=error.rank, at=error.node, bucket=error.bucket, bytes=error.nbytes
            )
        events.emit(fault)
        hopeless = isinstance(error, NoWorldError | NoRoomError)
        Standing(ready=False, reason=str(error), hopeless=hopeless).write(place.here.job.couriers(place.life))
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the step's log
    except BaseException:  # noqa: BLE001 - os._exit follows: nobody else would print it
        sys.excepthook(*sys.exc_info())
    os._exit(1)  # no orderly end: threads and other ranks would be waited for


def _serve(place: Place, events: EventLog) -> NoReturn:
    """Find the others, within a time, and carry versions."""
    join = _join_mpi if place.wire == "mpi" else _join_tcp
    link = meet(*join(place), place)
    faulthandler.cancel_dump_traceback_later()
    run, node = place.here.campaign, place.here.node
    key = window_key(run, node=node, part=node in place.sources and len(place.sources) > 1)
    if node not in place.sources:
        Receiver(key, link, job=place.here.job, events=events).serve()
    if node != place.sources[0]:
        Contributor(key, link, job=place.here.job, events=events).serve()
    ranks = {peer.node: rank for rank, peer in link.watch.peers.items()}
    Sender(
        key,
        link,
        job=place.here.job,
        events=events,
        standing=place.here.job.couriers(place.life),
        codec=place.codec,
        contributors=[ranks[node] for node in place.sources[1:]],
    ).serve()


def _join_mpi(place: Place) -> tuple[Wire, list[str]]:
    """The wire, and the node of every rank."""
    from hpcrl.weights.couriers import wire_mpi as mpi  # each wire brings a package that the other one does without

    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    return mpi.join(place.here.node, num_ranks=len(place.nodes))


def _join_tcp(place: Place) -> tuple[Wire, list[str]]:
    from hpcrl.weights.couriers import wire_tcp as tcp

    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    wire = tcp.join(
        place.here.node,
        nodes=place.nodes,
        meeting=place.here.job.meeting(place.life),
        interface=place.interface,
        timeout_s=WATCHDOG_S - SLACK_S,
    )
    return wire, list(place.nodes)


def meet(wire: Wire, nodes: list[str], place: Place) -> Link:
    """The link to those that this courier hears; NoWorldError unless every node has its courier."""
    if sorted(nodes) != sorted(place.nodes):
        raise NoWorldError(f"the couriers are on {', '.join(nodes)} and belong on {', '.join(place.nodes)}, one each")
    now = time.monotonic()
    peers = {rank: Peer(rank=rank, node=node, heard=now) for rank, node in enumerate(nodes) if place.sees(node)}
    return Link(wire, watch=Watch(peers=peers, silent_s=place.silent_s))


def _place(arguments: list[str]) -> Place:
    parser = argparse.ArgumentParser(prog="python -m hpcrl.weights.couriers")
    parser.add_argument("campaign", type=Path)
    parser.add_argument("job", type=int)
    parser.add_argument("nodes", help="all nodes that have a courier: a,b,c")
    parser.add_argument("sources", help="the trainer's nodes, the one of its rank 0 first: a,b")
    parser.add_argument("--wire", choices=["mpi", "tcp"], default="mpi")
    parser.add_argument("--interface", help="what TCP binds to")
    parser.add_argument("--codec", choices=get_args(Codec), default="auto", help="what goes over the wire")
    parser.add_argument("--life", default="0", help="a name that no earlier life of these couriers had")
    parser.add_argument("--silent-s", type=float, default=SILENT_S, help="after this silence a rank is stuck")
    given = parser.parse_args(arguments)
    run = RunDir(given.campaign)
    return Place(
        here=WorkerPlace(run, run.job(given.job), this_node()),
        nodes=tuple(given.nodes.split(",")),
        sources=tuple(given.sources.split(",")),
        wire=given.wire,
        life=given.life,
        codec=given.codec,
        interface=given.interface,
        silent_s=given.silent_s,
    )


if __name__ == "__main__":
    main()
