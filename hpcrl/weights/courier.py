"""One process a node carries versions from the trainer's window into the windows of all other nodes.

`python -m hpcrl.weights.courier CAMPAIGN JOB NODES SOURCE`, as many ranks as NODES (a,b,c) has names; SOURCE is the
trainer's node. Ranks know each other by node. Nothing blocks in the wire: every transfer is polled with naps, so that
couriers leave the cores to others, hear each other meanwhile, and notice who is stuck.
Any failure ends the whole step; the driver starts it again, and the newest version is sent again.

    sender.py      the trainer's node           receiver.py    every other node
    link.py        what both stand on           mpi.py tcp.py  the wires
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

from hpcrl.endpoints import this_node
from hpcrl.errors import WeightsError
from hpcrl.events import EventLog
from hpcrl.processes import die_with_parent
from hpcrl.rundir import JobDir, RunDir
from hpcrl.weights.link import Link, Wire
from hpcrl.weights.pace import Codec
from hpcrl.weights.receiver import Receiver
from hpcrl.weights.sender import Sender
from hpcrl.weights.transfer import SILENT_S, NoRoomError, NoWorldError, Peer, Standing, StuckError, Watch
from hpcrl.weights.window import window_key

WATCHDOG_S = 90.0
"""How long it may take to bring all ranks together; some are late, since their node is slow to import what it needs."""
SLACK_S = 10.0
"""So much earlier a wire gives up that can."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a courier is told."""

    run: RunDir
    job: JobDir
    node: str
    nodes: tuple[str, ...]
    source: str
    wire: str
    life: str
    codec: Codec
    interface: str | None
    silent_s: float


def main() -> NoReturn:
    """Be one rank of the couriers' step until the driver ends it."""
    die_with_parent(signal.SIGKILL)  # one that was stopped has to end with its step too
    faulthandler.enable()
    place = _place(sys.argv[1:])
    name = f"{place.job.number:03d}-courier-{place.node}"
    path = place.run.events / f"{name}.jsonl"
    events = EventLog(path, job=place.job.number, role="courier", worker=name, node=place.node)
    try:
        _serve(place, events)
    except WeightsError as error:
        facts = {}
        if isinstance(error, StuckError):
            facts = {"rank": error.rank, "at": error.node, "bucket": error.bucket, "bytes": error.nbytes}
        events.emit("fault", what="courier", detail=str(error), **facts)
        hopeless = isinstance(error, NoWorldError | NoRoomError)
        Standing(ready=False, reason=str(error), hopeless=hopeless).write(place.job.couriers(place.life))
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the step's log
    except BaseException:  # noqa: BLE001 - os._exit follows: nobody else would print it
        sys.excepthook(*sys.exc_info())
    os._exit(1)  # no orderly end: threads and other ranks would be waited for


def _serve(place: Place, events: EventLog) -> NoReturn:
    """Find the others, within a time, and carry versions."""
    join = _join_mpi if place.wire == "mpi" else _join_tcp
    link = meet(*join(place), place)
    faulthandler.cancel_dump_traceback_later()
    key = window_key(place.run, node=place.node)
    if place.node != place.source:
        Receiver(key, link, job=place.job, events=events).serve()
    standing = place.job.couriers(place.life)
    Sender(key, link, job=place.job, events=events, standing=standing, codec=place.codec).serve()


def _join_mpi(place: Place) -> tuple[Wire, list[str]]:
    """The wire, and the node of every rank."""
    from hpcrl.weights import mpi  # each wire brings a package that the other one does without

    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    return mpi.join(place.node, num_ranks=len(place.nodes))


def _join_tcp(place: Place) -> tuple[Wire, list[str]]:
    from hpcrl.weights import tcp

    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    wire = tcp.join(
        place.node,
        nodes=place.nodes,
        meeting=place.job.meeting(place.life),
        interface=place.interface,
        timeout_s=WATCHDOG_S - SLACK_S,
    )
    return wire, list(place.nodes)


def meet(wire: Wire, nodes: list[str], place: Place) -> Link:
    """The link to those that this courier hears; NoWorldError unless every node has its courier."""
    if sorted(nodes) != sorted(place.nodes):
        raise NoWorldError(f"the couriers are on {', '.join(nodes)} and belong on {', '.join(place.nodes)}, one each")
    now = time.monotonic()
    sees = [rank for rank, node in enumerate(nodes) if (node == place.source) != (place.node == place.source)]
    peers = {rank: Peer(rank=rank, node=nodes[rank], heard=now) for rank in sees}
    return Link(wire, watch=Watch(peers=peers, silent_s=place.silent_s))


def _place(arguments: list[str]) -> Place:
    parser = argparse.ArgumentParser(prog="python -m hpcrl.weights.courier")
    parser.add_argument("campaign", type=Path)
    parser.add_argument("job", type=int)
    parser.add_argument("nodes", help="all nodes that have a courier: a,b,c")
    parser.add_argument("source", help="the trainer's node")
    parser.add_argument("--wire", choices=["mpi", "tcp"], default="mpi")
    parser.add_argument("--interface", help="what TCP binds to")
    parser.add_argument("--codec", choices=get_args(Codec), default="auto", help="what goes over the wire")
    parser.add_argument("--life", default="0", help="a name that no earlier life of these couriers had")
    parser.add_argument("--silent-s", type=float, default=SILENT_S, help="after this silence a rank is stuck")
    given = parser.parse_args(arguments)
    run = RunDir(given.campaign)
    return Place(
        run=run,
        job=run.job(given.job),
        node=this_node(),
        nodes=tuple(given.nodes.split(",")),
        source=given.source,
        wire=given.wire,
        life=given.life,
        codec=given.codec,
        interface=given.interface,
        silent_s=given.silent_s,
    )


if __name__ == "__main__":
    main()
