"""A transport of couriers to peers that only receive."""

from collections.abc import Iterator

from hpcrl.weights.couriers.link import DoneCheck, MessageTag


class ListeningTransport:
    """Keeps what is sent; nothing is received."""

    rank = 1

    def __init__(self) -> None:
        self.messages: list[tuple[MessageTag, bytes]] = []
        self.sent: list[bytes] = []

    def send_message(self, message: bytes, *, to: int, tag: MessageTag) -> DoneCheck:
        self.messages.append((tag, message))
        return lambda: True

    def poll_messages(self, tag: MessageTag) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def send(self, chunk: memoryview, *, to: int) -> DoneCheck:
        assert to == 2
        self.sent.append(bytes(chunk))
        return lambda: True

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        raise AssertionError("no peer sends to it")
