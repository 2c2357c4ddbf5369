"""Two versions of the weights in named shared memory: one writer on a node, any number of readers map it.

    Window.create   the writer's end; takes over what an earlier writer of this job left, replaces all else
    Window.join     the end of a process that fills a slot together with the writer
    Window.open     a reader's end

The writer fills the slot that does not hold the newest version, so that one stays whole whatever becomes of the writer:

    writer       slot = window.begin(version, step=step); fill it; window.commit()
    joint_write  with window.part(turn) as slot: ...           # `ticket` is what the writer's window.turn() said
    reader       manifest = window.newest()
                 with window.reading(manifest.version) as slot: ...     # checked, and not overwritten meanwhile

A reader holds a lock on its slot, which ends with the process; the writer waits for it LEASE_S at most, and then the
reader's `read_version` ends with WeightsError. Every tensor is checked, once on a node: by the writer, if it knows the
checksums of what it has copied from, else by the first readers. The file is described in
hpcrl.weights.window.file, what a slot says of itself in hpcrl.weights.window.slot_headers.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import WeightsError
from hpcrl.system.files import make_private_dir, publish_file
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.versions import VersionManifest, check_newer
from hpcrl.weights.window import file, shm_cleanup
from hpcrl.weights.window.file import CHECKSUM_BYTES, UnusableWindowError, WindowKey, compute_checksum
from hpcrl.weights.window.slot_headers import SlotHeads, SlotState

LEASE_TIMEOUT_S = 10.0
"""How long the writer waits for a reader of the slot it needs; a stopped reader does not stop the training."""
LEASE_POLL_INTERVAL_S = 0.001
TOUCH_CHUNK_NBYTES = 64 << 20
WindowRole = Literal["writer", "part", "reader"]


class WriteTicket(NamedTuple):
    """A version that the writer has begun, for those who fill it together with the writer."""

    slot: int
    generation: int
    """The one it will have."""
    version: int


@dataclass
class Window:
    """One end of a window; `layout` says what is in each slot."""

    path: Path
    layout: TensorLayout
    job: int
    """Number of the job that made it."""
    role: WindowRole
    _fd: int
    _heads: SlotHeads
    _slots: mmap.mmap
    _writing: SlotState | None = field(default=None)
    _write_lease: int | None = field(default=None)
    _manifest: tuple[int, VersionManifest] | None = field(default=None)

    # ---- all ends

    @classmethod
    def create(cls, key: WindowKey, layout: TensorLayout, *, job: JobDir) -> "Window":
        """The writer's end. One of this job and layout is taken over with its versions, any other is replaced.

        WeightsError if another process writes it, if its name is taken by somebody else, or if memory is short.
        """
        make_private_dir(job.windows)
        publish_file(job.windows / key.path.name, str(key.path))
        with contextlib.suppress(UnusableWindowError):
            window = cls._map(key.path, role="writer")
            if window.job == job.number and window.layout == layout:
                return window
            window.close()
        file.remove_window_file(key.path)
        shm_cleanup.remove_orphans(key.directory)
        file.make_window_file(key.path, layout, job=job.number)
        try:
            return cls._map(key.path, role="writer")
        except OSError as error:
            file.remove_window_file(key.path)
            raise file.make_no_room_error(error, key.path, 2 * layout.nbytes) from error

    @classmethod
    def join(cls, key: WindowKey, *, job: int) -> "Window":
        """The end of a process that fills slots together with the writer; WeightsError if there is no such window."""
        with contextlib.suppress(UnusableWindowError):
            window = cls._map(key.path, role="part")
            if window.job == job:
                return window
            window.close()
        raise WeightsError(f"{key.path} is no window of job {job}: its writer makes it before others join")

    @classmethod
    def open(cls, key: WindowKey, *, job: int | None = None, touch: bool = True) -> "Window | None":
        """A reader's end, or None: there is none (of that job), it is being made, or it is not ours to trust.

        Without `touch` it is there at once, however large it is, and the first look at each page takes longer.
        """
        try:
            window = cls._map(key.path, role="reader", touch=touch)
        except (
            UnusableWindowError,
            WeightsError,
            OSError,
        ):  # whatever it is: an engine that lags behind asks for files
            return None
        if job is not None and window.job != job:
            window.close()
            return None
        return window

    @classmethod
    def reopen(cls, previous: "Window | None", key: WindowKey, *, job: int, touch: bool = True) -> "Window | None":
        """The reader's end of the window that has this name now: `previous`, or another in its place."""
        if previous is not None:
            if previous.is_current():
                return previous
            previous.close()
        return cls.open(key, job=job, touch=touch)

    def close(self) -> None:
        """Let go; memory that somebody still looks at is let go with the last look."""
        if self._fd < 0:
            return
        for memory in (self._heads.head, self._slots):
            with contextlib.suppress(BufferError):
                memory.close()
        self._drop_write_lease()
        if self.role == "writer":
            file.unlock_byte(self._fd, file.WRITER_LOCK)
        os.close(self._fd)
        self._fd = -1

    def unlink(self) -> None:
        """Remove the name; who has it mapped keeps it. For the one who created it."""
        if self.is_current():
            file.remove_window_file(self.path)

    def is_current(self) -> bool:
        """False once the file of that name is another, or gone: open it anew."""
        try:
            named = self.path.stat()
        except OSError:
            return False
        own = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    def newest(self) -> VersionManifest | None:
        """The newest complete version; cheap enough to ask many times a second."""
        state = self._heads.newest()
        return None if state is None else self._manifest_of(state)

    def manifest(self, version: int) -> VersionManifest:
        """Of either version; WeightsError if it is not there."""
        return self._manifest_of(self._state_of(version))

    def versions(self) -> list[int]:
        """The complete versions, oldest first."""
        return sorted(state.version for slot in (0, 1) if (state := self._heads.read(slot)) is not None)

    # ---- the writer's end

    def start_version(self, version: int, *, step: int) -> memoryview:
        """The bytes of the slot that does not hold the newest version, to be filled as the layout says.

        What an earlier `start_version` was given and did not commit is dropped.
        """
        newest = self._heads.newest()
        check_newer(version, newest=newest.version if newest else None)
        slot = 1 - newest.slot if newest else 0
        self._drop_write_lease()
        self._write_lease = self._lease(file.SLOT_LOCKS[slot], exclusive=True, wait_s=LEASE_TIMEOUT_S)
        self._wait_for_joint_writers(slot)
        generation = self._heads.generation(slot)
        generation += 2 if generation % 2 else 1
        self._heads.set_generation(slot, generation)
        self._writing = SlotState(
            slot=slot, generation=generation + 1, version=version, step=step, created=0.0, sums=b""
        )
        return self._bytes_of(slot)

    def ticket(self) -> WriteTicket:
        """What was begun, to be told to those who fill it too."""
        assert self._writing is not None, "begin comes before turn"
        return WriteTicket(slot=self._writing.slot, generation=self._writing.generation, version=self._writing.version)

    def commit(self, checksums: Mapping[str, str] | None = None, *, sums: list[bytes] | None = None) -> VersionManifest:
        """Make the version begun visible, complete, with the checksums of what lies in the slot.

        `sums`: those, in the layout's order, if the caller computed them while filling; else they are computed here.
        `checksums`: of what was to come into it; WeightsError names the first tensor that differs, and nothing is
        visible. A version that was compared so is checked: readers need not do it again.
        """
        assert self._writing is not None, "begin comes before commit"
        if sums is None:
            self.compute_checksums(self.ticket())
        checksum_bytes = self._heads.sums(self._writing.slot) if sums is None else b"".join(sums)
        state = SlotState(**{**vars(self._writing), "created": time.time(), "sums": checksum_bytes})
        if checksums is not None:
            self._compare_checksums(state, checksums)
            self._heads.mark_all("check", state.slot, state.generation)
        self._heads.write(state)
        self._writing = None
        self._drop_write_lease()
        return self._manifest_of(state)

    # ---- the end of one who helps the writer

    @contextlib.contextmanager
    def joint_write(self, ticket: WriteTicket) -> Iterator[memoryview]:
        """The bytes of the slot that the writer has begun; only so long as this block lasts will they be written.

        WeightsError if the writer has begun another one since.
        """
        lease = self._lease(file.JOINT_WRITE_LOCKS[ticket.slot], exclusive=False, wait_s=LEASE_TIMEOUT_S)
        try:
            if lease is None or self._heads.generation(ticket.slot) != ticket.generation - 1:
                raise WeightsError(
                    f"version {ticket.version} in {self.path} is not being written any more: take the next"
                )
            yield self._bytes_of(ticket.slot)
        finally:
            self._release(lease)

    def compute_checksums(self, ticket: WriteTicket) -> None:
        """Compute the checksums of the filled slot, together with the other processes that do."""
        data = self._bytes_of(ticket.slot)

        def compute_one(index: int) -> None:
            self._heads.set_sum(ticket.slot, index, compute_checksum(data, self.layout.tensors[index]))

        self._heads.share_work("sum", ticket.slot, ticket.generation, compute_one)

    # ---- the readers' end

    @contextlib.contextmanager
    def read_version(self, version: int) -> Iterator[memoryview]:
        """The bytes of a version, its checksums checked, read only; they may be used until the block ends.

        WeightsError: the version is not there, a tensor is damaged, or (on the way out) the writer did not wait.
        """
        with self.read_unchecked(version) as data:
            state = self._state_of(version)
            self._heads.share_work(
                "check", state.slot, state.generation, lambda index: self._check_tensor(state, data, index)
            )
            yield data

    @contextlib.contextmanager
    def read_unchecked(self, version: int) -> Iterator[memoryview]:
        """As `read_version`, for who sends the bytes on to one that checks them."""
        state = self._state_of(version)
        lease = self._lease(file.SLOT_LOCKS[state.slot], exclusive=False, wait_s=0.0)
        if lease is None or self._heads.read(state.slot) != state:
            self._release(lease)
            raise WeightsError(f"version {version} in {self.path} is being overwritten: take the newest")
        try:
            yield self._bytes_of(state.slot).toreadonly()
            if self._heads.generation(state.slot) != state.generation:
                raise WeightsError(
                    f"version {version} in {self.path} was overwritten while it was read "
                    f"(the writer waits {LEASE_TIMEOUT_S:g} s for a reader): take the newest"
                )
        finally:
            self._release(lease)

    @contextlib.contextmanager
    def read_optimistic(self, version: int) -> Iterator[memoryview]:
        """As `read_unchecked`, and the writer waits for nobody: what was read may be of another version.

        WeightsError on the way out if it was.
        """
        state = self._state_of(version)
        yield self._bytes_of(state.slot).toreadonly()
        if self._heads.generation(state.slot) != state.generation:
            raise WeightsError(f"version {version} in {self.path} was overwritten while it was read: take the newest")

    def is_intact(self, version: int) -> bool:
        """Is this version there, whole, at this moment?"""
        return version in self.versions()

    # ---- inside

    @classmethod
    def _map(cls, path: Path, *, role: WindowRole, touch: bool = True) -> "Window":
        """Map what is there. UnusableError if nothing of ours is; WeightsError if it must be left alone."""
        fd = file.open_own_file(path)
        try:
            job, layout, places = file.identify_window(fd)
            if not file.try_lock(fd, file.OPEN_LOCK, exclusive=False):
                raise UnusableWindowError  # it is being removed: everybody who had it is dead
            if role == "writer":
                file.take_writer_lock(fd, path)
            head = mmap.mmap(fd, places.head_nbytes)
            slots = mmap.mmap(
                fd,
                max(2 * places.slot_nbytes, 1),
                flags=mmap.MAP_SHARED,
                prot=mmap.PROT_READ | (0 if role == "reader" else mmap.PROT_WRITE),
                offset=places.head_nbytes,
            )
            if touch:
                _touch_pages(slots)
        except BaseException:
            os.close(fd)
            raise
        return cls(
            path=path, layout=layout, job=job, role=role, _fd=fd, _heads=SlotHeads(head, layout, places), _slots=slots
        )

    def _bytes_of(self, slot: int) -> memoryview:
        start = slot * self._heads.offsets.slot_nbytes
        return memoryview(self._slots)[start : start + self.layout.nbytes]

    def _state_of(self, version: int) -> SlotState:
        for slot in (0, 1):
            if (state := self._heads.read(slot)) is not None and state.version == version:
                return state
        available = ", ".join(map(str, self.versions())) or "none"
        raise WeightsError(f"version {version} is not in {self.path} (there: {available}): take the newest")

    def _manifest_of(self, state: SlotState) -> VersionManifest:
        known = self._manifest
        if known is None or (known[0], known[1].version) != (state.generation, state.version):
            sums = {tensor.name: _get_checksum(state, index).hex() for index, tensor in enumerate(self.layout.tensors)}
            manifest = VersionManifest(version=state.version, step=state.step, checksums=sums, created=state.created)
            self._manifest = known = (state.generation, manifest)
        return known[1]

    def _check_tensor(self, state: SlotState, data: memoryview, index: int) -> None:
        tensor, expected = self.layout.tensors[index], _get_checksum(state, index)
        if (actual := compute_checksum(data, tensor)) != expected:
            raise WeightsError(
                f"version {state.version} in {self.path}: tensor {tensor.name!r} has checksum {actual.hex()}, "
                f"and {expected.hex()} was committed: the memory is damaged; take another version"
            )

    def _compare_checksums(self, state: SlotState, expected: Mapping[str, str]) -> None:
        names = [tensor.name for tensor in self.layout.tensors]
        if unmatched := sorted(expected.keys() ^ set(names)):
            raise WeightsError(
                f"version {state.version}: tensor {unmatched[0]!r} is in the layout or was announced, but not both"
            )
        for index, name in enumerate(names):
            if (actual := _get_checksum(state, index).hex()) != expected[name]:
                raise WeightsError(
                    f"version {state.version}: tensor {name!r} arrived with checksum {actual}, {expected[name]} was sent: "
                    "it was damaged, or changed, on the way; the version before it stays in use"
                )

    def _wait_for_joint_writers(self, slot: int) -> None:
        """WeightsError if a process of an earlier turn goes on filling the slot."""
        lease = self._lease(file.JOINT_WRITE_LOCKS[slot], exclusive=True, wait_s=LEASE_TIMEOUT_S)
        if lease is None:
            raise WeightsError(
                f"a rank still fills slot {slot} of {self.path} after {LEASE_TIMEOUT_S:g} s, for a version that was given up: "
                "end the trainer's other ranks before they are started again"
            )
        self._release(lease)

    def _lease(self, byte: int, *, exclusive: bool, wait_s: float) -> int | None:
        """A lock on a byte, held by the descriptor that is returned; None if it was not free within `wait_s`.

        Each has a descriptor of its own, since locks of one descriptor do not exclude each other.
        """
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        deadline = time.monotonic() + wait_s
        while not file.try_lock(fd, byte, exclusive=exclusive):
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(LEASE_POLL_INTERVAL_S)
        return fd

    def _drop_write_lease(self) -> None:
        self._release(self._write_lease)
        self._write_lease = None

    @staticmethod
    def _release(lease: int | None) -> None:
        if lease is not None:
            os.close(lease)


def _touch_pages(slots: mmap.mmap) -> None:
    """Map all pages now, so that no copy waits for it later; in pieces, for MAP_POPULATE would hold the GIL for all.

    A read is enough for a writer too: the pages are the file's, and nobody is told of writing to them.
    """
    with memoryview(slots) as pages:
        for start in range(0, len(pages), TOUCH_CHUNK_NBYTES):
            bytes(pages[start : start + TOUCH_CHUNK_NBYTES : mmap.PAGESIZE])


def _get_checksum(state: SlotState, index: int) -> bytes:
    return state.sums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]
