"""Two versions of the weights in named shared memory: one writer on a node, any number of readers map it.

    Key, window_key   which window: user, campaign, node
    Window.create     the writer's end; takes over what an earlier writer of this job left, replaces all else
    Window.open       a reader's end
    unlink_recorded   remove the windows of a job whose processes are gone

The file, 0600, under /dev/shm: a header page, the layout, for each slot the checksums and the marks of its tensors,
then the two slots. The writer fills the slot that does not hold the newest version, so that one stays whole whatever
becomes of the writer:

    writer   slot = window.begin(version, step=step); fill it; window.commit()
    reader   manifest = window.newest()
             with window.reading(manifest.version) as slot: ...     # checked, and not overwritten meanwhile

A slot's generation is odd while it is written. Its seal, over generation, version and checksums, makes a header that
was read half old, half new look like no version at all, whatever the order in which memory shows. A reader holds a lock
on its slot, which ends with the process; the writer waits for it LEASE_S at most, and then the reader's `reading` ends
with WeightsError. Every tensor
is checked, once on a node: the marks say what another reader has checked.
"""

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from hpcrl.errors import WeightsError
from hpcrl.files import private_dir, publish
from hpcrl.rundir import JobDir, RunDir
from hpcrl.weights.layout import Layout, Placed
from hpcrl.weights.versions import Manifest, check_newer

SHARED_MEMORY = Path("/dev/shm")
LEASE_S = 10.0
"""How long the writer waits for a reader of the slot it needs; a stopped reader does not stop the training."""
CLAIM_S = 1.0
"""How long a reader waits for the checks that another has begun; that one may have been killed."""
MAGIC = b"hpcrlWN1"
SUM_BYTES = 16
HASH_THREADS = min(4, len(os.sched_getaffinity(0)))
SMALL_BYTES = 4 << 20
"""Below this, threads cost more than they save."""
_HEAD = struct.Struct("=8sQQQQ16s")
"""Magic, job, writer's pid, bytes of the layout, bytes of a slot, digest of the layout."""
_WRITER_LOCK = 0
_SLOT_LOCKS = (1, 2)
_SLOT_HEADS = (1024, 2048)
_SLOT_HEAD = struct.Struct("=Qqqd16s")
"""Generation, version, step, time of creation, seal."""


@dataclass(frozen=True)
class Key:
    """Which window: one a user, campaign and node."""

    campaign: Path
    node: str
    directory: Path = SHARED_MEMORY

    @property
    def path(self) -> Path:
        """Its file; campaigns of one name in two homes differ."""
        root = self.campaign.resolve()
        return (
            self.directory / f"hpcrl-{os.getuid()}-{root.name[:80]}-{xxhash.xxh3_64_hexdigest(bytes(root))}-{self.node}"
        )


@dataclass(frozen=True)
class _State:
    """What a slot holds."""

    slot: int
    generation: int
    version: int
    step: int
    created: float
    sums: bytes


@dataclass(frozen=True)
class _Places:
    """Where things are in the file."""

    num_tensors: int
    layout_nbytes: int
    slot_nbytes: int

    @property
    def tables(self) -> int:
        """Checksums and marks of slot 0, then of slot 1."""
        return mmap.PAGESIZE + self.layout_nbytes + -self.layout_nbytes % 8

    @property
    def table_nbytes(self) -> int:
        return self.num_tensors * (SUM_BYTES + 8)

    @property
    def head_nbytes(self) -> int:
        """All before the slots."""
        return _pages(self.tables + 2 * self.table_nbytes)

    @property
    def nbytes(self) -> int:
        return self.head_nbytes + 2 * self.slot_nbytes

    def sums(self, slot: int) -> slice:
        """The bytes of the checksums of a slot."""
        start = self.tables + slot * self.table_nbytes
        return slice(start, start + self.num_tensors * SUM_BYTES)

    def mark(self, slot: int, index: int) -> int:
        """Index, in words of 8 bytes, of the mark that says in which generation a tensor was checked."""
        start = self.tables + slot * self.table_nbytes + self.num_tensors * SUM_BYTES
        return start // 8 + index


@dataclass
class Window:
    """One end of a window; `layout` says what is in each slot."""

    path: Path
    layout: Layout
    job: int
    """Number of the job that made it."""
    is_writer: bool
    _fd: int
    _places: _Places
    _head: mmap.mmap
    _slots: mmap.mmap
    _writing: _State | None = field(default=None)
    _write_lease: int | None = field(default=None)
    _manifest: tuple[int, Manifest] | None = field(default=None)

    # ---- both ends

    @classmethod
    def create(cls, key: Key, layout: Layout, *, job: JobDir) -> "Window":
        """The writer's end. One of this job and layout is taken over with its versions, any other is replaced.

        WeightsError if another process writes it, if its name is taken by somebody else, or if memory is short.
        """
        private_dir(job.windows)
        publish(job.windows / key.path.name, str(key.path))
        with contextlib.suppress(_Unusable):
            window = cls._map(key.path, writer=True)
            if window.job == job.number and window.layout == layout:
                return window
            window.close()
        _remove(key.path)
        _make(key.path, layout, job=job.number)
        try:
            return cls._map(key.path, writer=True)
        except OSError as error:
            _remove(key.path)
            raise WeightsError(_no_room(error, key.path, 2 * layout.nbytes)) from error

    @classmethod
    def open(cls, key: Key, *, job: int | None = None) -> "Window | None":
        """A reader's end, or None: there is none (of that job), it is being made, or it is not ours to trust."""
        try:
            window = cls._map(key.path, writer=False)
        except (_Unusable, WeightsError, OSError):  # whatever it is: an engine that lags behind asks for files
            return None
        if job is not None and window.job != job:
            window.close()
            return None
        return window

    def close(self) -> None:
        """Let go; memory that somebody still looks at is let go with the last look."""
        if self._fd < 0:
            return
        for memory in (self._head, self._slots):
            with contextlib.suppress(BufferError):
                memory.close()
        self._drop_write_lease()
        if self.is_writer:
            _unlock(self._fd, _WRITER_LOCK)
        os.close(self._fd)
        self._fd = -1

    def unlink(self) -> None:
        """Remove the name; who has it mapped keeps it. For the one who created it."""
        if self.is_current():
            _remove(self.path)

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
        state = self._newest_state()
        return None if state is None else self._manifest_of(state)

    def versions(self) -> list[int]:
        """The complete versions, oldest first."""
        return sorted(state.version for slot in (0, 1) if (state := self._state(slot)) is not None)

    # ---- the writer's end

    def begin(self, version: int, *, step: int) -> memoryview:
        """The bytes of the slot that does not hold the newest version, to be filled as the layout says.

        What an earlier `begin` was given and did not commit is dropped.
        """
        newest = self._newest_state()
        check_newer(version, than=newest.version if newest else None)
        slot = 1 - newest.slot if newest else 0
        self._drop_write_lease()
        self._write_lease = self._lease(slot, exclusive=True, wait_s=LEASE_S)
        generation = self._generation(slot)
        generation += 2 if generation % 2 else 1
        self._set_generation(slot, generation)
        self._writing = _State(slot=slot, generation=generation + 1, version=version, step=step, created=0.0, sums=b"")
        return self._bytes_of(slot)

    def commit(self, checksums: Mapping[str, str] | None = None, *, sums: list[bytes] | None = None) -> Manifest:
        """Make the version begun visible, complete, with the checksums of what lies in the slot.

        `sums`: those, in the layout's order, if the caller computed them while filling; else they are computed here.
        `checksums`: what another node sent; WeightsError names the first tensor that differs, and nothing is visible.
        """
        assert self._writing is not None, "begin comes before commit"
        writing = self._writing
        if sums is None:
            sums = _sums_of(self.layout, self._bytes_of(writing.slot))
        if checksums is not None:
            self._compare(sums, checksums, version=writing.version)
        done = _State(**{**vars(writing), "created": time.time(), "sums": b"".join(sums)})
        self._head[self._places.sums(done.slot)] = done.sums
        head = (done.generation, done.version, done.step, done.created, _seal(done))
        start = _SLOT_HEADS[done.slot]
        self._head[start + 8 : start + _SLOT_HEAD.size] = _SLOT_HEAD.pack(*head)[8:]
        self._set_generation(done.slot, done.generation)  # last: from here on it is seen
        self._writing = None
        self._drop_write_lease()
        return self._manifest_of(done)

    # ---- the readers' end

    @contextlib.contextmanager
    def reading(self, version: int) -> Iterator[memoryview]:
        """The bytes of a version, its checksums checked, read only; they may be used until the block ends.

        WeightsError: the version is not there, a tensor is damaged, or (on the way out) the writer did not wait.
        """
        with self.unchecked(version) as data:
            self._check(self._state_of(version), data)
            yield data

    @contextlib.contextmanager
    def unchecked(self, version: int) -> Iterator[memoryview]:
        """As `reading`, for who sends the bytes on to one that checks them."""
        state = self._state_of(version)
        lease = self._lease(state.slot, exclusive=False, wait_s=0.0)
        if lease is None or self._state(state.slot) != state:
            self._release(lease)
            raise WeightsError(f"version {version} in {self.path} is being overwritten: take the newest")
        try:
            yield self._bytes_of(state.slot).toreadonly()
            if self._generation(state.slot) != state.generation:
                raise WeightsError(
                    f"version {version} in {self.path} was overwritten while it was read "
                    f"(the writer waits {LEASE_S:g} s for a reader): take the newest"
                )
        finally:
            self._release(lease)

    def still(self, version: int) -> bool:
        """Is this version there, whole, at this moment?"""
        return version in self.versions()

    # ---- inside

    @classmethod
    def _map(cls, path: Path, *, writer: bool) -> "Window":
        """Map what is there. _Unusable if nothing of ours is; WeightsError if it must be left alone."""
        fd = _open_own(path)
        try:
            job, layout, places = _read_head(fd, path)
            if writer:
                _take_writer_lock(fd, path)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writer else 0)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            head = mmap.mmap(fd, places.head_nbytes)
            slots = mmap.mmap(
                fd, max(2 * places.slot_nbytes, 1), flags=flags, prot=protection, offset=places.head_nbytes
            )
        except BaseException:
            os.close(fd)
            raise
        return cls(
            path=path, layout=layout, job=job, is_writer=writer, _fd=fd, _places=places, _head=head, _slots=slots
        )

    def _bytes_of(self, slot: int) -> memoryview:
        start = slot * self._places.slot_nbytes
        return memoryview(self._slots)[start : start + self.layout.nbytes]

    def _generation(self, slot: int) -> int:
        return int(memoryview(self._head).cast("Q")[_SLOT_HEADS[slot] // 8])

    def _set_generation(self, slot: int, generation: int) -> None:
        memoryview(self._head).cast("Q")[_SLOT_HEADS[slot] // 8] = generation

    def _state(self, slot: int) -> _State | None:
        """What a slot holds; None if that is nothing, or is just changing."""
        generation, version, step, created, seal = _SLOT_HEAD.unpack_from(self._head, _SLOT_HEADS[slot])
        if generation % 2 or generation == 0:
            return None
        sums = self._head[self._places.sums(slot)]
        state = _State(slot=slot, generation=generation, version=version, step=step, created=created, sums=sums)
        return state if _seal(state) == seal else None

    def _newest_state(self) -> _State | None:
        states = [state for slot in (0, 1) if (state := self._state(slot)) is not None]
        return max(states, key=lambda state: state.version, default=None)

    def _state_of(self, version: int) -> _State:
        for slot in (0, 1):
            if (state := self._state(slot)) is not None and state.version == version:
                return state
        there = ", ".join(map(str, self.versions())) or "none"
        raise WeightsError(f"version {version} is not in {self.path} (there: {there}): take the newest")

    def _manifest_of(self, state: _State) -> Manifest:
        if (
            self._manifest is None
            or self._manifest[0] != state.generation
            or self._manifest[1].version != state.version
        ):
            sums = {
                tensor.name: state.sums[i * SUM_BYTES : (i + 1) * SUM_BYTES].hex()
                for i, tensor in enumerate(self.layout.tensors)
            }
            manifest = Manifest(version=state.version, step=state.step, checksums=sums, created=state.created)
            self._manifest = (state.generation, manifest)
        return self._manifest[1]

    def _check(self, state: _State, data: memoryview) -> None:
        """Compare every tensor with its checksum; the readers of a node share the work through the marks."""
        checked, claimed = state.generation, state.generation + 1
        places = [self._places.mark(state.slot, index) for index in range(len(self.layout.tensors))]
        with memoryview(self._head).cast("Q") as marks:
            left = [index for index in self._largest_first if marks[places[index]] != checked]
            for index in left:
                if marks[places[index]] not in (checked, claimed):
                    marks[places[index]] = claimed
                    self._check_one(state, data, index)
                    marks[places[index]] = checked
            deadline = time.monotonic() + CLAIM_S
            for index in left:
                while marks[places[index]] == claimed and time.monotonic() < deadline:
                    time.sleep(0.0002)
                if marks[places[index]] != checked:
                    self._check_one(state, data, index)
                    marks[places[index]] = checked

    @functools.cached_property
    def _largest_first(self) -> list[int]:
        tensors = self.layout.tensors
        return sorted(range(len(tensors)), key=lambda index: tensors[index].nbytes, reverse=True)

    def _check_one(self, state: _State, data: memoryview, index: int) -> None:
        tensor = self.layout.tensors[index]
        wanted = state.sums[index * SUM_BYTES : (index + 1) * SUM_BYTES]
        if (seen := _sum_of(data, tensor)) != wanted:
            raise WeightsError(
                f"version {state.version} in {self.path}: tensor {tensor.name!r} has checksum {seen.hex()}, "
                f"and {wanted.hex()} was committed: the memory is damaged; take another version"
            )

    def _compare(self, sums: list[bytes], wanted: Mapping[str, str], *, version: int) -> None:
        names = [tensor.name for tensor in self.layout.tensors]
        if odd := sorted(wanted.keys() ^ set(names)):
            raise WeightsError(f"version {version}: tensor {odd[0]!r} is in the layout or was announced, but not both")
        for name, seen in zip(names, sums, strict=True):
            if seen.hex() != wanted[name]:
                raise WeightsError(
                    f"version {version}: tensor {name!r} arrived with checksum {seen.hex()}, {wanted[name]} was sent: "
                    "the transfer is damaged; the version before it stays in use"
                )

    def _lease(self, slot: int, *, exclusive: bool, wait_s: float) -> int | None:
        """A lock on a slot, held by the descriptor that is returned; None if it was not free within `wait_s`.

        Each has a descriptor of its own, since locks of one descriptor do not exclude each other.
        """
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        deadline = time.monotonic() + wait_s
        while not _lock(fd, _SLOT_LOCKS[slot], exclusive=exclusive):
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(0.001)
        return fd

    def _drop_write_lease(self) -> None:
        self._release(self._write_lease)
        self._write_lease = None

    @staticmethod
    def _release(lease: int | None) -> None:
        if lease is not None:
            os.close(lease)


def window_key(run: RunDir, *, node: str) -> Key:
    """The window of a campaign on a node."""
    return Key(campaign=run.root, node=node)


def unlink_recorded(job: JobDir) -> list[str]:
    """Remove every window of this host that a process of `job` made; for when those processes are gone."""
    removed = []
    for record in sorted(job.windows.glob("*")) if job.windows.is_dir() else []:
        path = Path(record.read_text())
        if path.name != record.name:  # not written to its end: the window was not made either
            continue
        ours = [there for there in (path, _fresh(path)) if _is_ours(there)]
        for there in ours:
            there.unlink(missing_ok=True)
        if ours:
            removed.append(path.name)
    return removed


def _is_ours(path: Path) -> bool:
    """Is it a file of this user? A link, or what another user put in its place, is left alone."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()


class _Unusable(Exception):
    """There is no window of that name, or none that can be used."""


def _make(path: Path, layout: Layout, *, job: int) -> None:
    """A new window under its name, complete."""
    described = layout.to_json()
    places = _Places(
        num_tensors=len(layout.tensors),
        layout_nbytes=len(described),
        slot_nbytes=max(_pages(layout.nbytes), mmap.PAGESIZE),
    )
    fresh = _fresh(path)
    fd = -1
    try:
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.posix_fallocate(fd, 0, places.nbytes)  # a page that cannot be had is an error now, not SIGBUS later
        head = (MAGIC, job, os.getpid(), len(described), places.slot_nbytes, bytes.fromhex(layout.digest()))
        os.pwrite(fd, _HEAD.pack(*head), 0)
        os.pwrite(fd, described, mmap.PAGESIZE)
        fresh.rename(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise WeightsError(_no_room(error, path, places.nbytes)) from error
    finally:
        if fd >= 0:
            os.close(fd)


def _no_room(error: OSError, path: Path, nbytes: int) -> str:
    free = ""
    with contextlib.suppress(OSError):
        facts = os.statvfs(path.parent)
        free = f", {facts.f_bavail * facts.f_frsize / 2**20:.1f} MiB are free there"
    return (
        f"no window of {nbytes / 2**20:.1f} MiB (two versions) in {path.parent}: {error.strerror}{free}; "
        "weights go by files instead; enlarge it, or ask for nodes with more memory"
    )


def _open_own(path: Path) -> int:
    """Open a file that is ours alone; what another user put there is never touched."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise _Unusable from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be opened ({error.strerror}): somebody else uses this name") from error
    facts = os.fstat(fd)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        os.close(fd)
        raise WeightsError(
            f"{path} belongs to user {facts.st_uid} with mode {facts.st_mode & 0o777:o}, and has to be ours with 600: "
            "remove it if it is not a trap"
        )
    return fd


def _read_head(fd: int, path: Path) -> tuple[int, Layout, _Places]:
    """Job, layout and places of the window in `fd`; _Unusable if it is none."""
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
        raise _Unusable
    _, job, _, layout_nbytes, slot_nbytes, digest = _HEAD.unpack(head)
    described = os.pread(fd, min(layout_nbytes, os.fstat(fd).st_size), mmap.PAGESIZE)
    if xxhash.xxh3_128_digest(described) != digest:
        raise _Unusable
    layout = Layout.from_json(described)
    places = _Places(num_tensors=len(layout.tensors), layout_nbytes=layout_nbytes, slot_nbytes=slot_nbytes)
    if slot_nbytes < layout.nbytes or os.fstat(fd).st_size != places.nbytes:
        raise _Unusable
    return job, layout, places


def _take_writer_lock(fd: int, path: Path) -> None:
    if not _lock(fd, _WRITER_LOCK, exclusive=True):
        pid = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))[2]
        raise WeightsError(
            f"{path} is being written by another process (made by {pid}): only one may publish on a node"
        )


def _lock(fd: int, byte: int, *, exclusive: bool) -> bool:
    """Try to lock one byte of the file; such a lock belongs to the descriptor and ends with it."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _unlock(fd: int, byte: int) -> None:
    """Let go now: memory that is still looked at keeps a copy of the descriptor, and with it the lock."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        _fresh(path).unlink(missing_ok=True)
    except OSError as error:
        raise WeightsError(f"{path} cannot be removed ({error.strerror}): it belongs to somebody else") from error


def _fresh(path: Path) -> Path:
    """What a window is called until it is complete."""
    return path.with_name(path.name + ".new")


def _seal(state: _State) -> bytes:
    head = struct.pack("=Qqqd", state.generation, state.version, state.step, state.created)
    return xxhash.xxh3_128_digest(head + state.sums)


def _sums_of(layout: Layout, data: memoryview) -> list[bytes]:
    """The checksums of all tensors, in the layout's order."""
    sums = [b""] * len(layout.tensors)

    def compute(index: int, tensor: Placed) -> None:
        sums[index] = _sum_of(data, tensor)

    for_each_tensor(layout, compute)
    return sums


def for_each_tensor(layout: Layout, work: Callable[[int, Placed], None]) -> None:
    """Do it for all tensors on a few threads, each with its share of the bytes; the first error is raised."""
    shares: list[list[tuple[int, Placed]]] = [[] for _ in range(HASH_THREADS)]
    loads = [0] * HASH_THREADS
    for index, tensor in sorted(enumerate(layout.tensors), key=lambda pair: pair[1].nbytes, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append((index, tensor))
        loads[lightest] += tensor.nbytes

    def do(share: list[tuple[int, Placed]]) -> None:
        for index, tensor in share:
            work(index, tensor)

    if layout.nbytes < SMALL_BYTES:
        do([pair for share in shares for pair in share])
        return
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="checksums") as pool:
        list(pool.map(do, shares))


def _sum_of(data: memoryview, tensor: Placed) -> bytes:
    return xxhash.xxh3_128_digest(data[tensor.offset : tensor.offset + tensor.nbytes])


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
