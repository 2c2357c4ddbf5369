"""A spool and a weight store in the memory of one process, with the behaviour of those on disk."""

import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial

from hpcrl.errors import WeightsError
from hpcrl.spool.reader import Cursor
from hpcrl.spool.record import Packed, parse_facts, with_columns
from hpcrl.spool.writer import Batching, BatchWriter
from hpcrl.weights.store import Tensors, _checksums, _manifest, _verify
from hpcrl.weights.versions import Manifest, WeightVersion, check_newer


class MemorySpool:
    """A spool that lives as long as the process: for tests and simulation."""

    def __init__(self) -> None:
        self.durable: list[Packed] = []


class MemorySpoolWriter(BatchWriter):
    """A producer's way into a spool in memory."""

    def __init__(
        self,
        spool: MemorySpool,
        *,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(lambda batch: partial(spool.durable.extend, batch), batching=batching, clock=clock)


class MemorySpoolReader(Cursor):
    """A consumer's cursor in a spool in memory."""

    def __init__(self, spool: MemorySpool, *, consumed: Container[str] = ()) -> None:
        super().__init__(consumed=consumed)
        self._spool = spool
        self._next = 0

    def _fill(self) -> bool:
        if self._next == len(self._spool.durable):
            return False
        packed = self._spool.durable[self._next]
        self._ready.append((str(self._next), with_columns(parse_facts(packed.facts), packed.columns)))
        self._next += 1
        return True


class MemoryStore:
    """Versions in one process, for tests and for a trainer and an engine that share it."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[Manifest, Tensors]] = {}

    def publish(self, tensors: Tensors, weight_version: WeightVersion) -> Manifest:
        version = weight_version.version
        check_newer(version, than=max(self._versions, default=None))
        copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        manifest = _manifest(weight_version, _checksums(copies))
        self._versions[version] = (manifest, copies)
        return manifest

    def newest(self) -> Manifest | None:
        return self._versions[max(self._versions)][0] if self._versions else None

    def load(self, version: int) -> Tensors:
        if version not in self._versions:
            there = ", ".join(map(str, sorted(self._versions))) or "none"
            raise WeightsError(f"version {version} is not in memory (there: {there}): take the newest")
        manifest, tensors = self._versions[version]
        _verify(tensors, manifest, where="memory")
        return dict(tensors)

    @contextmanager
    def reading(self, version: int) -> Iterator[Tensors]:
        yield self.load(version)

    def still(self, version: int) -> bool:
        return True  # nobody writes there again

    def prune(self, *, keep: int) -> None:
        for version in sorted(self._versions)[: -max(keep, 1)]:
            del self._versions[version]
