"""A spool and a weight store in the memory of one process; they behave like those on disk."""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hpcrl.errors import WeightsError
from hpcrl.spool.reader import SpoolCursor
from hpcrl.spool.record import PackedTrajectory, Trajectory, attach_columns, parse_facts
from hpcrl.spool.writer import BatchLimits, BatchWriter
from hpcrl.weights.stores.store import Tensors, compute_checksums, make_manifest, verify_tensors
from hpcrl.weights.versions import VersionManifest, WeightVersion, check_newer


class MemorySpool:
    """A spool that lasts as long as the process, for tests and simulation."""

    def __init__(self) -> None:
        self.durable: list[PackedTrajectory] = []


class MemorySpoolWriter(BatchWriter):
    """A producer's writer to a spool in memory."""

    def __init__(
        self,
        spool: MemorySpool,
        *,
        batching: BatchLimits = BatchLimits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(lambda batch: partial(spool.durable.extend, batch), batching=batching, clock=clock)


class MemorySpoolReader(SpoolCursor):
    """A consumer's cursor in a spool in memory."""

    def __init__(self, spool: MemorySpool, *, consumed: Container[str] = ()) -> None:
        super().__init__(consumed=consumed)
        self._spool = spool
        self._next = 0

    def _read_new_sources(self) -> Iterator[tuple[str, Sequence[Trajectory]]]:
        while self._next < len(self._spool.durable):
            packed = self._spool.durable[self._next]
            self._next += 1
            yield str(self._next), [attach_columns(parse_facts(packed.facts), packed.columns)]


class MemoryStore:
    """A weight store in one process, for tests and for a trainer and an engine that share the process."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[VersionManifest, Tensors]] = {}

    def publish(self, tensors: Tensors, weight_version: WeightVersion) -> VersionManifest:
        version = weight_version.version
        check_newer(version, newest=max(self._versions, default=None))
        copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        manifest = make_manifest(weight_version, compute_checksums(copies))
        self._versions[version] = (manifest, copies)
        return manifest

    def newest(self) -> VersionManifest | None:
        return self._versions[max(self._versions)][0] if self._versions else None

    def load(self, version: int) -> Tensors:
        if version not in self._versions:
            available = ", ".join(map(str, sorted(self._versions))) or "none"
            raise WeightsError(f"version {version} is not in memory (available: {available}): load the newest")
        manifest, tensors = self._versions[version]
        verify_tensors(tensors, manifest, where="memory")
        return dict(tensors)

    @contextmanager
    def read_version(self, version: int) -> Iterator[Tensors]:
        yield self.load(version)

    def is_intact(self, version: int) -> bool:
        return True  # versions are never overwritten

    def check_version(self, version: int) -> None:
        self.load(version)

    def prune(self, *, keep: int) -> None:
        for version in sorted(self._versions)[: -max(keep, 1)]:
            del self._versions[version]
