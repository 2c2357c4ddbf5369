"""Run one courier, which transfers versions from the trainer's windows into the windows of all other nodes.

    python -m hpcrl.weights.couriers CAMPAIGN JOB NODES SOURCES

There is one rank for each name in NODES (a,b,c); SOURCES are the trainer's nodes, that of its rank 0 first. Ranks
identify each other by node. No transfer blocks: each is polled with naps, so that couriers leave the cores to others,
receive messages meanwhile, and detect a stuck rank. Any failure ends the whole step; the driver starts it again, and
the newest version is sent again.

    CourierSettings   the arguments of a courier
    main              run a courier
    connect_couriers  make the connection to a courier's peers
"""

import argparse
import contextlib
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
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import CodecSetting
from hpcrl.errors import ConfigError, WeightsError
from hpcrl.system.network import current_node, find_bind_address
from hpcrl.system.processes import die_with_parent
from hpcrl.system.wakeups import WakeSender
from hpcrl.weights.couriers.link import ByteTransport, CourierConnection
from hpcrl.weights.couriers.part_sender import PartSender
from hpcrl.weights.couriers.protocol import (
    RANK_SILENCE_TIMEOUT_S,
    CourierPeer,
    CourierStatus,
    NoRoomError,
    NoWorldError,
    PeerWatch,
    RankLostError,
    RankStuckError,
)
from hpcrl.weights.couriers.receiver import VersionReceiver
from hpcrl.weights.couriers.sender import VersionSender
from hpcrl.weights.window.file import make_window_key

JOIN_TIMEOUT_S = 90.0
"""Limit on the time until all ranks are connected; some are late, since imports are slow on their node."""
JOIN_MARGIN_S = 10.0
"""A transport that can stop trying does so this much earlier."""


@dataclass(frozen=True, kw_only=True)
class CourierSettings:
    """The arguments of a courier."""

    here: WorkerPlace
    nodes: tuple[str, ...]
    sources: tuple[str, ...]
    transport_name: str
    incarnation: str
    codec: CodecSetting
    interfaces: tuple[str, ...]
    silence_timeout_s: float

    def is_peer(self, node: str) -> bool:
        """Return True if the node is a peer: the first source has all others as peers, and they have it."""
        return (node == self.sources[0]) != (self.here.node == self.sources[0])


def main() -> NoReturn:
    """Run one rank of the couriers' step until the driver ends it."""
    die_with_parent(signal.SIGKILL)  # a stopped process must end with its step too
    faulthandler.enable()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # warnings of the end, which are for the driver
        signal.signal(number, signal.SIG_IGN)
    settings = _parse_settings(sys.argv[1:])
    here = settings.here
    events = EventLog.open(here.campaign, "courier", here.node, job=here.job.number, role="courier", node=here.node)
    try:
        _run_courier(settings, events)
    except WeightsError as error:
        if isinstance(error, RankLostError) and here.job.drain.exists():
            os._exit(0)  # all couriers end now, one of them first
        fault = FaultReported(what="courier", detail=str(error))
        if isinstance(error, RankStuckError):
            fault = msgspec.structs.replace(
                fault, rank=error.rank, at=error.node, bucket=error.bucket, bytes=error.nbytes
            )
        events.emit(fault)
        is_hopeless = isinstance(error, NoWorldError | NoRoomError)
        CourierStatus(ready=False, reason=str(error), hopeless=is_hopeless).write(
            settings.here.job.courier_status(settings.incarnation)
        )
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the step's log is where people look
    except BaseException:  # noqa: BLE001 - reported, and the process ends at once in any case
        sys.excepthook(*sys.exc_info())
    os._exit(1)  # an orderly end would wait for threads and other ranks


def _run_courier(settings: CourierSettings, events: EventLog) -> NoReturn:
    """Connect to the others, within the time limit, and transfer versions."""
    join = _join_mpi if settings.transport_name == "mpi" else _join_tcp
    connection = connect_couriers(*join(settings), settings)
    faulthandler.cancel_dump_traceback_later()
    run, node = settings.here.campaign, settings.here.node
    key = make_window_key(run, node=node, part=node in settings.sources and len(settings.sources) > 1)
    if node not in settings.sources:
        receiver = VersionReceiver(
            key, connection, job=settings.here.job, events=events, on_received=_make_sender(settings).wake
        )
        try:
            receiver.serve()
        except RankLostError:
            if settings.here.job.drain.exists():
                receiver.exit_process()
            raise
    if node != settings.sources[0]:
        PartSender(key, connection, job=settings.here.job, events=events).serve()
    ranks = {peer.node: rank for rank, peer in connection.watch.peers.items()}
    VersionSender(
        key,
        connection,
        job=settings.here.job,
        events=events,
        status_path=settings.here.job.courier_status(settings.incarnation),
        codec=settings.codec,
        contributors=[ranks[node] for node in settings.sources[1:]],
    ).serve()


def _make_sender(settings: CourierSettings) -> WakeSender:
    """Return what wakes the engines of this node."""
    host = None
    with contextlib.suppress(OSError, ConfigError):
        host = find_bind_address(settings.interfaces)
    return WakeSender(settings.here.job.wakeups, "prefill-", "decode-", host=host, is_local=True)


def _join_mpi(settings: CourierSettings) -> tuple[ByteTransport, list[str]]:
    """Return the transport, and the node of every rank."""
    from hpcrl.weights.couriers import mpi_transport  # each transport imports a package that the other does not need

    faulthandler.dump_traceback_later(JOIN_TIMEOUT_S, exit=True)
    return mpi_transport.join_ranks(settings.here.node, num_ranks=len(settings.nodes))


def _join_tcp(settings: CourierSettings) -> tuple[ByteTransport, list[str]]:
    from hpcrl.weights.couriers import tcp_transport

    faulthandler.dump_traceback_later(JOIN_TIMEOUT_S, exit=True)
    transport = tcp_transport.join_ranks(
        settings.here.node,
        nodes=settings.nodes,
        meeting=settings.here.job.meeting(settings.incarnation),
        interfaces=settings.interfaces,
        timeout_s=JOIN_TIMEOUT_S - JOIN_MARGIN_S,
    )
    return transport, list(settings.nodes)


def connect_couriers(transport: ByteTransport, nodes: list[str], settings: CourierSettings) -> CourierConnection:
    """Make the connection to this courier's peers; NoWorldError unless every node has its courier."""
    if sorted(nodes) != sorted(settings.nodes):
        raise NoWorldError(
            f"the couriers run on {', '.join(nodes)} and must run on {', '.join(settings.nodes)}, one each"
        )
    now = time.monotonic()
    peers = {
        rank: CourierPeer(rank=rank, node=node, last_received=now)
        for rank, node in enumerate(nodes)
        if settings.is_peer(node)
    }
    return CourierConnection(transport, watch=PeerWatch(peers=peers, silence_timeout_s=settings.silence_timeout_s))


def _parse_settings(arguments: list[str]) -> CourierSettings:
    parser = argparse.ArgumentParser(prog="python -m hpcrl.weights.couriers")
    parser.add_argument("campaign", type=Path)
    parser.add_argument("job", type=int)
    parser.add_argument("nodes", help="all nodes that have a courier: a,b,c")
    parser.add_argument("sources", help="the trainer's nodes, the one of its rank 0 first: a,b")
    parser.add_argument("--wire", choices=["mpi", "tcp"], default="mpi")
    parser.add_argument("--interface", action="append", default=[], help="a network interface that TCP may bind to")
    parser.add_argument(
        "--codec", choices=get_args(CodecSetting), default="auto", help="what is sent: full versions or deltas"
    )
    parser.add_argument("--incarnation", default="0", help="a name that no earlier run of them had")
    parser.add_argument("--silent-s", type=float, default=RANK_SILENCE_TIMEOUT_S, help="longest silence of a rank")
    given = parser.parse_args(arguments)
    campaign = CampaignDir(given.campaign)
    return CourierSettings(
        here=WorkerPlace(campaign.job(given.job), current_node()),
        nodes=tuple(given.nodes.split(",")),
        sources=tuple(given.sources.split(",")),
        transport_name=given.wire,
        incarnation=given.incarnation,
        codec=given.codec,
        interfaces=tuple(given.interface),
        silence_timeout_s=given.silent_s,
    )


if __name__ == "__main__":
    main()
