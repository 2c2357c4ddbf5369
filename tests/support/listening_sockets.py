"""The TCP sockets at which processes listen, and which of them other machines could reach."""

import ipaddress
from collections.abc import Iterable

import psutil


def list_listening(pids: Iterable[int]) -> dict[str, set[str]]:
    """Return the addresses at which processes listen, by their command lines."""
    found: dict[str, set[str]] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            sockets = process.net_connections("tcp")
            addresses = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
            words = " ".join(process.cmdline())
        except psutil.Error:  # it has ended meanwhile
            continue
        if addresses:
            found.setdefault(words, set()).update(addresses)
    return found


def choose_exposed(listening: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return what listens at another address than those of the loopback interface."""
    exposed = {words: {one for one in addresses if not _is_loopback(one)} for words, addresses in listening.items()}
    return {words: addresses for words, addresses in exposed.items() if addresses}


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
