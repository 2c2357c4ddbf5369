"""The window: two versions of the weights in named shared memory, with one writer and any number of readers on a node.

    Window.create   the writer's end; takes over what an earlier writer of this job left, replaces all else
    Window.join     the end of a process that fills a slot together with the writer
    Window.open     a reader's end
    WriteTicket     a version that the writer has started, for processes that join
    WindowRole      writer, part, reader
    VersionGoneError  a version is not there, or no longer

The writer fills the slot that does not hold the newest version, so that this one stays whole if the writer fails:

    writer: slot = window.start_version(version, step=step); fill it; window.commit()
    part:   with window.joint_write(ticket) as slot: ...             # `ticket` is from the writer's window.ticket()
    reader: manifest = window.newest()
            with window.read_version(manifest.version) as slot: ...  # checked, and not overwritten meanwhile

A reader holds a lock on its slot, which ends with the process; the writer waits for it LEASE_TIMEOUT_S at most, and
then the reader's `read_version` ends with WeightsError. Every tensor is checked once on a node: by the writer, if it
has the checksums of its source, else by the first readers. `hpcrl.weights.window.file` describes the file,
`hpcrl.weights.window.slot_headers` the headers of the slots.
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
from hpcrl.system.byte_locks import try_lock, unlock_byte
from hpcrl.system.files import make_private_dir, publish_file
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.versions import VersionManifest, check_newer
from hpcrl.weights.window import file, shm_cleanup
from hpcrl.weights.window.file import CHECKSUM_BYTES, UnusableWindowError, WindowKey, compute_checksum
from hpcrl.weights.window.slot_headers import SlotHeads, SlotState

LEASE_TIMEOUT_S = 10.0
"""The longest that the writer waits for a reader of the slot it needs; a stopped reader does not stop training."""
LEASE_POLL_INTERVAL_S = 0.001
TOUCH_CHUNK_NBYTES = 64 << 20
WindowRole = Literal["writer", "part", "reader"]


class VersionGoneError(WeightsError):
    """A version is not in a window, or is being overwritten; a newer one is or will be."""


class WriteTicket(NamedTuple):
    """A version that the writer has started, for processes that fill it together with the writer."""

    slot: int
    generation: int
    """The slot's generation once it is committed."""
    version: int


@dataclass
class Window:
    """An end of a window; each slot has the `layout`."""

    path: Path
    layout: TensorLayout
    job: int
    """Number of the job that created it."""
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
        """Open the writer's end. A window of this job and layout keeps its versions, any other is replaced.

        WeightsError if another process writes it, if another user has its name, or if memory is short.
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
        """Open the end of a process that fills slots with the writer; WeightsError if the window does not exist."""
        with contextlib.suppress(UnusableWindowError):
            window = cls._map(key.path, role="part")
            if window.job == job:
                return window
            window.close()
        raise WeightsError(f"{key.path} is not a window of job {job}: its writer must create it before others join")

    @classmethod
    def open(cls, key: WindowKey, *, job: int | None = None, touch: bool = True) -> "Window | None":
        """Open a reader's end; None if the window (of that job) is absent, incomplete or not ours.

        Without `touch` this returns at once, whatever the size, and the first access to each page takes longer.
        """
        try:
            window = cls._map(key.path, role="reader", touch=touch)
        except (
            UnusableWindowError,
            WeightsError,
            OSError,
        ):  # in any case, an engine without newer versions asks for files
            return None
        if job is not None and window.job != job:
            window.close()
            return None
        return window

    @classmethod
    def reopen(cls, previous: "Window | None", key: WindowKey, *, job: int, touch: bool = True) -> "Window | None":
        """Return the reader's end of the window that has this name now: `previous`, or another in its place."""
        if previous is not None:
            if previous.is_current():
                return previous
            previous.close()
        return cls.open(key, job=job, touch=touch)

    def close(self) -> None:
        """Close this end; memory that is still in use is unmapped after its last use."""
        if self._fd < 0:
            return
        for memory in (self._heads.head, self._slots):
            with contextlib.suppress(BufferError):
                memory.close()
        self._drop_write_lease()
        if self.role == "writer":
            unlock_byte(self._fd, file.WRITER_LOCK)
        os.close(self._fd)
        self._fd = -1

    def unlink(self) -> None:
        """Remove the name; a process that has the window mapped keeps it. Only its creator calls this."""
        if self.is_current():
            file.remove_window_file(self.path)

    def is_current(self) -> bool:
        """Return False once the file of that name is another, or gone: then open it again."""
        try:
            named = self.path.stat()
        except OSError:
            return False
        own = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    def newest(self) -> VersionManifest | None:
        """Return the newest complete version; cheap enough to call many times a second."""
        state = self._heads.newest()
        return None if state is None else self._manifest_of(state)

    def manifest(self, version: int) -> VersionManifest:
        """Return the manifest of either version; WeightsError if it is not there."""
        return self._manifest_of(self._state_of(version))

    def versions(self) -> list[int]:
        """List the complete versions, oldest first."""
        return sorted(state.version for slot in (0, 1) if (state := self._heads.read(slot)) is not None)

    # ---- the writer's end

    def start_version(self, version: int, *, step: int) -> memoryview:
        """Return the slot that does not hold the newest version, to be filled according to the layout.

        A version that an earlier call started and did not commit is dropped.
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
        """Return the ticket of the started version, to be sent to the processes that fill it too."""
        assert self._writing is not None, "start_version comes before ticket"
        return WriteTicket(slot=self._writing.slot, generation=self._writing.generation, version=self._writing.version)

    def commit(self, checksums: Mapping[str, str] | None = None, *, sums: list[bytes] | None = None) -> VersionManifest:
        """Make the started version visible, with the checksums of the slot's content.

        `sums` are these checksums, in the layout's order; without them they are computed here.
        `checksums` are the expected ones: WeightsError names the first tensor that differs, and nothing becomes
        visible. A version compared with them counts as checked: readers need not check it again.
        """
        assert self._writing is not None, "start_version comes before commit"
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

    # ---- the end of a process that helps the writer

    @contextlib.contextmanager
    def joint_write(self, ticket: WriteTicket) -> Iterator[memoryview]:
        """Yield the slot that the writer has started to fill; write to it only inside this block.

        WeightsError if the writer has started another version since.
        """
        lease = self._lease(file.JOINT_WRITE_LOCKS[ticket.slot], exclusive=False, wait_s=LEASE_TIMEOUT_S)
        try:
            if lease is None or self._heads.generation(ticket.slot) != ticket.generation - 1:
                raise WeightsError(f"version {ticket.version} in {self.path} is not being written now: join the next")
            yield self._bytes_of(ticket.slot)
        finally:
            self._release(lease)

    def compute_checksums(self, ticket: WriteTicket) -> None:
        """Compute the checksums of the filled slot, together with the other processes that call this."""
        data = self._bytes_of(ticket.slot)

        def compute_one(index: int) -> None:
            self._heads.set_sum(ticket.slot, index, compute_checksum(data, self.layout.tensors[index]))

        self._heads.share_work("sum", ticket.slot, ticket.generation, compute_one)

    # ---- the readers' end

    @contextlib.contextmanager
    def read_version(self, version: int) -> Iterator[memoryview]:
        """Yield the bytes of a version, checked and read-only, to be used until the block ends.

        WeightsError if the version is absent, a tensor is damaged, or (at the end) the writer did not wait.
        """
        with self.read_unchecked(version) as data:
            state = self._state_of(version)
            self._heads.share_work(
                "check", state.slot, state.generation, lambda index: self._check_tensor(state, data, index)
            )
            yield data

    @contextlib.contextmanager
    def read_unchecked(self, version: int) -> Iterator[memoryview]:
        """Yield as `read_version` does, but unchecked: for bytes that are sent to a receiver that checks them."""
        state = self._state_of(version)
        lease = self._lease(file.SLOT_LOCKS[state.slot], exclusive=False, wait_s=0.0)
        if lease is None or self._heads.read(state.slot) != state:
            self._release(lease)
            raise VersionGoneError(f"version {version} in {self.path} is being overwritten: read the newest")
        try:
            yield self._bytes_of(state.slot).toreadonly()
            if self._heads.generation(state.slot) != state.generation:
                raise VersionGoneError(
                    f"version {version} in {self.path} was overwritten while it was read "
                    f"(the writer waits {LEASE_TIMEOUT_S:g} s for a reader): read the newest"
                )
        finally:
            self._release(lease)

    @contextlib.contextmanager
    def read_optimistic(self, version: int) -> Iterator[memoryview]:
        """Yield as `read_unchecked` does, but take no lock: the writer may overwrite the bytes meanwhile.

        WeightsError at the end of the block if it did.
        """
        state = self._state_of(version)
        yield self._bytes_of(state.slot).toreadonly()
        if self._heads.generation(state.slot) != state.generation:
            raise VersionGoneError(
                f"version {version} in {self.path} was overwritten while it was read: read the newest"
            )

    def is_intact(self, version: int) -> bool:
        """Return True if this version is there, whole, at this moment."""
        return version in self.versions()

    # ---- inside

    @classmethod
    def _map(cls, path: Path, *, role: WindowRole, touch: bool = True) -> "Window":
        """Map the file. UnusableWindowError if it is not a window of ours; WeightsError if it must be left alone."""
        fd = file.open_own_file(path)
        try:
            job, layout, places = file.identify_window(fd)
            if not try_lock(fd, file.OPEN_LOCK, exclusive=False):
                raise UnusableWindowError  # it is being removed: all processes that had it have ended
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
        raise VersionGoneError(f"version {version} is not in {self.path} (available: {available}): read the newest")

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
                f"and {expected.hex()} was committed: the memory is damaged; read another version"
            )

    def _compare_checksums(self, state: SlotState, expected: Mapping[str, str]) -> None:
        names = [tensor.name for tensor in self.layout.tensors]
        if unmatched := sorted(expected.keys() ^ set(names)):
            raise WeightsError(
                f"version {state.version}: tensor {unmatched[0]!r} is in the layout or in the announcement, not in both"
            )
        for index, name in enumerate(names):
            if (actual := _get_checksum(state, index).hex()) != expected[name]:
                raise WeightsError(
                    f"version {state.version}: tensor {name!r} arrived with checksum {actual}, "
                    f"{expected[name]} was sent: it was damaged, or changed, on the way; "
                    "the version before it stays in use"
                )

    def _wait_for_joint_writers(self, slot: int) -> None:
        """Wait for processes with an earlier ticket; WeightsError if one keeps filling the slot."""
        lease = self._lease(file.JOINT_WRITE_LOCKS[slot], exclusive=True, wait_s=LEASE_TIMEOUT_S)
        if lease is None:
            raise WeightsError(
                f"a rank still fills slot {slot} of {self.path} after {LEASE_TIMEOUT_S:g} s, for a version that was "
                "dropped: end the trainer's other ranks before they are restarted"
            )
        self._release(lease)

    def _lease(self, byte: int, *, exclusive: bool, wait_s: float) -> int | None:
        """Lock a byte; return the descriptor that holds the lock, or None if it was not free within `wait_s`.

        Each lock has a separate descriptor, since locks of one descriptor do not exclude each other.
        """
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        deadline = time.monotonic() + wait_s
        while not try_lock(fd, byte, exclusive=exclusive):
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
    """Map all pages now, so that no copy waits for it later; in chunks, since MAP_POPULATE would hold the GIL.

    Reading is enough for a writer too: the pages are the file's, and writing to them needs no notification.
    """
    with memoryview(slots) as pages:
        for start in range(0, len(pages), TOUCH_CHUNK_NBYTES):
            bytes(pages[start : start + TOUCH_CHUNK_NBYTES : mmap.PAGESIZE])


def _get_checksum(state: SlotState, index: int) -> bytes:
    return state.sums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]
