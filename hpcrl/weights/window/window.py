"""Two versions of the weights in named shared memory: one writer on a node, any number of readers map it.

    Window.create   the writer's end; takes over what an earlier writer of this job left, replaces all else
    Window.join     the end of a process that fills a slot together with the writer
    Window.open     a reader's end

The writer fills the slot that does not hold the newest version, so that one stays whole whatever becomes of the writer:

    writer   slot = window.begin(version, step=step); fill it; window.commit()
    part     with window.part(turn) as slot: ...           # `turn` is what the writer's window.turn() said
    reader   manifest = window.newest()
             with window.reading(manifest.version) as slot: ...     # checked, and not overwritten meanwhile

A reader holds a lock on its slot, which ends with the process; the writer waits for it LEASE_S at most, and then the
reader's `reading` ends with WeightsError. Every tensor is checked, once on a node: by the writer, if it knows the
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
from hpcrl.system.files import private_dir, publish
from hpcrl.weights.layout import Layout
from hpcrl.weights.versions import Manifest, check_newer
from hpcrl.weights.window import file, shm_cleanup
from hpcrl.weights.window.file import SUM_BYTES, Key, UnusableError, sum_of
from hpcrl.weights.window.slot_headers import SlotHeads, State

LEASE_S = 10.0
"""How long the writer waits for a reader of the slot it needs; a stopped reader does not stop the training."""
LEASE_NAP_S = 0.001
TOUCH_NBYTES = 64 << 20
End = Literal["writer", "part", "reader"]


class Turn(NamedTuple):
    """A version that the writer has begun, for those who fill it together with the writer."""

    slot: int
    generation: int
    """The one it will have."""
    version: int


@dataclass
class Window:
    """One end of a window; `layout` says what is in each slot."""

    path: Path
    layout: Layout
    job: int
    """Number of the job that made it."""
    end: End
    _fd: int
    _heads: SlotHeads
    _slots: mmap.mmap
    _writing: State | None = field(default=None)
    _write_lease: int | None = field(default=None)
    _manifest: tuple[int, Manifest] | None = field(default=None)

    # ---- all ends

    @classmethod
    def create(cls, key: Key, layout: Layout, *, job: JobDir) -> "Window":
        """The writer's end. One of this job and layout is taken over with its versions, any other is replaced.

        WeightsError if another process writes it, if its name is taken by somebody else, or if memory is short.
        """
        private_dir(job.windows)
        publish(job.windows / key.path.name, str(key.path))
        with contextlib.suppress(UnusableError):
            window = cls._map(key.path, end="writer")
            if window.job == job.number and window.layout == layout:
                return window
            window.close()
        file.remove(key.path)
        shm_cleanup.sweep(key.directory)
        file.make(key.path, layout, job=job.number)
        try:
            return cls._map(key.path, end="writer")
        except OSError as error:
            file.remove(key.path)
            raise file.no_room(error, key.path, 2 * layout.nbytes) from error

    @classmethod
    def join(cls, key: Key, *, job: int) -> "Window":
        """The end of a process that fills slots together with the writer; WeightsError if there is no such window."""
        with contextlib.suppress(UnusableError):
            window = cls._map(key.path, end="part")
            if window.job == job:
                return window
            window.close()
        raise WeightsError(f"{key.path} is no window of job {job}: its writer makes it before others join")

    @classmethod
    def open(cls, key: Key, *, job: int | None = None, touch: bool = True) -> "Window | None":
        """A reader's end, or None: there is none (of that job), it is being made, or it is not ours to trust.

        Without `touch` it is there at once, however large it is, and the first look at each page takes longer.
        """
        try:
            window = cls._map(key.path, end="reader", touch=touch)
        except (UnusableError, WeightsError, OSError):  # whatever it is: an engine that lags behind asks for files
            return None
        if job is not None and window.job != job:
            window.close()
            return None
        return window

    @classmethod
    def renewed(cls, before: "Window | None", key: Key, *, job: int, touch: bool = True) -> "Window | None":
        """The reader's end of the window that has this name now: `before`, or another in its place."""
        if before is not None:
            if before.is_current():
                return before
            before.close()
        return cls.open(key, job=job, touch=touch)

    def close(self) -> None:
        """Let go; memory that somebody still looks at is let go with the last look."""
        if self._fd < 0:
            return
        for memory in (self._heads.head, self._slots):
            with contextlib.suppress(BufferError):
                memory.close()
        self._drop_write_lease()
        if self.end == "writer":
            file.unlock(self._fd, file.WRITER_LOCK)
        os.close(self._fd)
        self._fd = -1

    def unlink(self) -> None:
        """Remove the name; who has it mapped keeps it. For the one who created it."""
        if self.is_current():
            file.remove(self.path)

    def is_current(self) -> bool:
        """False once the file of that name is another, or gone: open it anew."""
        try:
            there = self.path.stat()
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def newest(self) -> Manifest | None:
        """The newest complete version; cheap enough to ask many times a second."""
        state = self._heads.newest()
        return None if state is None else self._manifest_of(state)

    def manifest(self, version: int) -> Manifest:
        """Of either version; WeightsError if it is not there."""
        return self._manifest_of(self._state_of(version))

    def versions(self) -> list[int]:
        """The complete versions, oldest first."""
        return sorted(state.version for slot in (0, 1) if (state := self._heads.read(slot)) is not None)

    # ---- the writer's end

    def begin(self, version: int, *, step: int) -> memoryview:
        """The bytes of the slot that does not hold the newest version, to be filled as the layout says.

        What an earlier `begin` was given and did not commit is dropped.
        """
        newest = self._heads.newest()
        check_newer(version, than=newest.version if newest else None)
        slot = 1 - newest.slot if newest else 0
        self._drop_write_lease()
        self._write_lease = self._lease(file.SLOT_LOCKS[slot], exclusive=True, wait_s=LEASE_S)
        self._await_parts(slot)
        generation = self._heads.generation(slot)
        generation += 2 if generation % 2 else 1
        self._heads.set_generation(slot, generation)
        self._writing = State(slot=slot, generation=generation + 1, version=version, step=step, created=0.0, sums=b"")
        return self._bytes_of(slot)

    def turn(self) -> Turn:
        """What was begun, to be told to those who fill it too."""
        assert self._writing is not None, "begin comes before turn"
        return Turn(slot=self._writing.slot, generation=self._writing.generation, version=self._writing.version)

    def commit(self, checksums: Mapping[str, str] | None = None, *, sums: list[bytes] | None = None) -> Manifest:
        """Make the version begun visible, complete, with the checksums of what lies in the slot.

        `sums`: those, in the layout's order, if the caller computed them while filling; else they are computed here.
        `checksums`: of what was to come into it; WeightsError names the first tensor that differs, and nothing is
        visible. A version that was compared so is checked: readers need not do it again.
        """
        assert self._writing is not None, "begin comes before commit"
        if sums is None:
            self.sum_up(self.turn())
        joined = self._heads.sums(self._writing.slot) if sums is None else b"".join(sums)
        done = State(**{**vars(self._writing), "created": time.time(), "sums": joined})
        if checksums is not None:
            self._compare(done, checksums)
            self._heads.mark_all("check", done.slot, done.generation)
        self._heads.write(done)
        self._writing = None
        self._drop_write_lease()
        return self._manifest_of(done)

    # ---- the end of one who helps the writer

    @contextlib.contextmanager
    def part(self, turn: Turn) -> Iterator[memoryview]:
        """The bytes of the slot that the writer has begun; only so long as this block lasts will they be written.

        WeightsError if the writer has begun another one since.
        """
        lease = self._lease(file.PART_LOCKS[turn.slot], exclusive=False, wait_s=LEASE_S)
        try:
            if lease is None or self._heads.generation(turn.slot) != turn.generation - 1:
                raise WeightsError(
                    f"version {turn.version} in {self.path} is not being written any more: take the next"
                )
            yield self._bytes_of(turn.slot)
        finally:
            self._release(lease)

    def sum_up(self, turn: Turn) -> None:
        """Compute the checksums of the filled slot, together with the other processes that do."""
        data = self._bytes_of(turn.slot)

        def do(index: int) -> None:
            self._heads.set_sum(turn.slot, index, sum_of(data, self.layout.tensors[index]))

        self._heads.together("sum", turn.slot, turn.generation, do)

    # ---- the readers' end

    @contextlib.contextmanager
    def reading(self, version: int) -> Iterator[memoryview]:
        """The bytes of a version, its checksums checked, read only; they may be used until the block ends.

        WeightsError: the version is not there, a tensor is damaged, or (on the way out) the writer did not wait.
        """
        with self.unchecked(version) as data:
            state = self._state_of(version)
            self._heads.together(
                "check", state.slot, state.generation, lambda index: self._check_one(state, data, index)
            )
            yield data

    @contextlib.contextmanager
    def unchecked(self, version: int) -> Iterator[memoryview]:
        """As `reading`, for who sends the bytes on to one that checks them."""
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
                    f"(the writer waits {LEASE_S:g} s for a reader): take the newest"
                )
        finally:
            self._release(lease)

    @contextlib.contextmanager
    def glancing(self, version: int) -> Iterator[memoryview]:
        """As `unchecked`, and the writer waits for nobody: what was read may be of another version.

        WeightsError on the way out if it was.
        """
        state = self._state_of(version)
        yield self._bytes_of(state.slot).toreadonly()
        if self._heads.generation(state.slot) != state.generation:
            raise WeightsError(f"version {version} in {self.path} was overwritten while it was read: take the newest")

    def still(self, version: int) -> bool:
        """Is this version there, whole, at this moment?"""
        return version in self.versions()

    # ---- inside

    @classmethod
    def _map(cls, path: Path, *, end: End, touch: bool = True) -> "Window":
        """Map what is there. UnusableError if nothing of ours is; WeightsError if it must be left alone."""
        fd = file.open_own(path)
        try:
            job, layout, places = file.identify(fd)
            if not file.try_lock(fd, file.LIFE_LOCK, exclusive=False):
                raise UnusableError  # it is being removed: everybody who had it is dead
            if end == "writer":
                file.take_writer_lock(fd, path)
            head = mmap.mmap(fd, places.head_nbytes)
            slots = mmap.mmap(
                fd,
                max(2 * places.slot_nbytes, 1),
                flags=mmap.MAP_SHARED,
                prot=mmap.PROT_READ | (0 if end == "reader" else mmap.PROT_WRITE),
                offset=places.head_nbytes,
            )
            if touch:
                _touch(slots)
        except BaseException:
            os.close(fd)
            raise
        return cls(
            path=path, layout=layout, job=job, end=end, _fd=fd, _heads=SlotHeads(head, layout, places), _slots=slots
        )

    def _bytes_of(self, slot: int) -> memoryview:
        start = slot * self._heads.places.slot_nbytes
        return memoryview(self._slots)[start : start + self.layout.nbytes]

    def _state_of(self, version: int) -> State:
        for slot in (0, 1):
            if (state := self._heads.read(slot)) is not None and state.version == version:
                return state
        there = ", ".join(map(str, self.versions())) or "none"
        raise WeightsError(f"version {version} is not in {self.path} (there: {there}): take the newest")

    def _manifest_of(self, state: State) -> Manifest:
        known = self._manifest
        if known is None or (known[0], known[1].version) != (state.generation, state.version):
            sums = {tensor.name: _sum_in(state, index).hex() for index, tensor in enumerate(self.layout.tensors)}
            manifest = Manifest(version=state.version, step=state.step, checksums=sums, created=state.created)
            self._manifest = known = (state.generation, manifest)
        return known[1]

    def _check_one(self, state: State, data: memoryview, index: int) -> None:
        tensor, wanted = self.layout.tensors[index], _sum_in(state, index)
        if (seen := sum_of(data, tensor)) != wanted:
            raise WeightsError(
                f"version {state.version} in {self.path}: tensor {tensor.name!r} has checksum {seen.hex()}, "
                f"and {wanted.hex()} was committed: the memory is damaged; take another version"
            )

    def _compare(self, state: State, wanted: Mapping[str, str]) -> None:
        names = [tensor.name for tensor in self.layout.tensors]
        if odd := sorted(wanted.keys() ^ set(names)):
            raise WeightsError(
                f"version {state.version}: tensor {odd[0]!r} is in the layout or was announced, but not both"
            )
        for index, name in enumerate(names):
            if (seen := _sum_in(state, index).hex()) != wanted[name]:
                raise WeightsError(
                    f"version {state.version}: tensor {name!r} arrived with checksum {seen}, {wanted[name]} was sent: "
                    "it was damaged, or changed, on the way; the version before it stays in use"
                )

    def _await_parts(self, slot: int) -> None:
        """WeightsError if a process of an earlier turn goes on filling the slot."""
        lease = self._lease(file.PART_LOCKS[slot], exclusive=True, wait_s=LEASE_S)
        if lease is None:
            raise WeightsError(
                f"a rank still fills slot {slot} of {self.path} after {LEASE_S:g} s, for a version that was given up: "
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
            time.sleep(LEASE_NAP_S)
        return fd

    def _drop_write_lease(self) -> None:
        self._release(self._write_lease)
        self._write_lease = None

    @staticmethod
    def _release(lease: int | None) -> None:
        if lease is not None:
            os.close(lease)


def _touch(slots: mmap.mmap) -> None:
    """Map all pages now, so that no copy waits for it later; in pieces, for MAP_POPULATE would hold the GIL for all.

    A read is enough for a writer too: the pages are the file's, and nobody is told of writing to them.
    """
    with memoryview(slots) as pages:
        for start in range(0, len(pages), TOUCH_NBYTES):
            bytes(pages[start : start + TOUCH_NBYTES : mmap.PAGESIZE])


def _sum_in(state: State, index: int) -> bytes:
    return state.sums[index * SUM_BYTES : (index + 1) * SUM_BYTES]
