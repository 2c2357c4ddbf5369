"""The store at which the ranks of a trainer meet."""

from pathlib import Path

from hpcrl.trainers.world import _connect_store, _open_store

LISTENING = "0A"
LOOPBACK = "0100007F"


def list_listening(port: int) -> list[str]:
    """Return the addresses at which sockets of this machine listen on a port, as the kernel writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == LISTENING]
    return [address for address, number in places if int(number, 16) == port]


def test_it_listens_at_one_address_only(tmp_path: Path) -> None:
    store = _open_store(tmp_path / "meeting", 2, {"MASTER_ADDR": "127.0.0.1"})
    other = _connect_store(tmp_path / "meeting", 2)
    other.set("a", "b")
    assert store.get("a") == b"b"
    assert list_listening(store.port) == [LOOPBACK]
