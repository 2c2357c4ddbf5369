"""xxh3 of the tensors in a slot, on a few threads.

The file of a window: its name, how it is made, known again, locked and removed.

    WindowKey, make_window_key         which window: user, campaign, node
    make_window_file, identify_window  a new one under its name - what there is under a name
    try_lock, unlock_byte              bytes of the file that stand for its writer, who uses a slot, and who has it open
    unlink_recorded_windows            remove the windows of a job whose processes are gone

A header page, the layout, for each slot the checksums and the marks of its tensors, then the two slots (`WindowOffsets`).
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.errors import WeightsError
from hpcrl.weights.checksum import hash_bytes
from hpcrl.weights.layout import TensorLayout, TensorSlot

CHECKSUM_BYTES = 16
NUM_HASH_THREADS = min(4, len(os.sched_getaffinity(0)))
MIN_THREADED_BYTES = 4 << 20
"""Below this, threads cost more than they save."""


def compute_checksum(data: memoryview, tensor: TensorSlot) -> bytes:
    """The checksum of one tensor in a slot."""
    return hash_bytes(data[tensor.offset : tensor.offset + tensor.nbytes])


def process_tensors(layout: TensorLayout, process: Callable[[int, TensorSlot], None]) -> None:
    """Do it for all tensors on a few threads, each with its share of the bytes; the first error is raised."""
    shares = split_by_bytes(layout, NUM_HASH_THREADS)

    def process_share(share: list[int]) -> None:
        for index in share:
            process(index, layout.tensors[index])

    if layout.nbytes < MIN_THREADED_BYTES:
        process_share([index for share in shares for index in share])
        return
    with ThreadPoolExecutor(NUM_HASH_THREADS, thread_name_prefix="checksums") as pool:
        list(pool.map(process_share, shares))


def split_by_bytes(layout: TensorLayout, num_shares: int) -> list[list[int]]:
    """Indices of the tensors, in shares of about as many bytes, the largest first."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for index in sorted(range(len(layout.tensors)), key=lambda index: -layout.tensors[index].nbytes):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += layout.tensors[index].nbytes
    return shares


SHARED_MEMORY = Path("/dev/shm")
MAGIC = b"hpcrlWN3"
_HEAD = struct.Struct("=8sQQQQ16s")
"""Magic, job, writer's pid, bytes of the layout, bytes of a slot, digest of the layout."""
WRITER_LOCK = 0
SLOT_LOCKS = (1, 2)
JOINT_WRITE_LOCKS = (3, 4)
"""Shared by the processes that fill a slot together with the writer."""
OPEN_LOCK = 5
"""Shared by all who have the window open; without it they are dead (hpcrl.weights.window.shm_cleanup)."""
UNFINISHED_SUFFIX = ".new"
"""What the name of a window ends with until it is complete."""
SLOT_HEAD_OFFSETS = (1024, 2048)
"""Where the header page says what a slot holds."""


@dataclass(frozen=True)
class WindowKey:
    """Which window: one a user, campaign and node."""

    campaign: Path
    node: str
    directory: Path = SHARED_MEMORY
    part: bool = False
    """Of a trainer on several nodes: it holds what lies here, and no engine looks into it."""

    @property
    def path(self) -> Path:
        """Its file; campaigns of one name in two homes differ."""
        root = self.campaign.resolve()
        suffix = f"{root.name[:80]}-{xxhash.xxh3_64_hexdigest(bytes(root))}-{self.node}"
        return self.directory / f"hpcrl-{os.getuid()}-{suffix}{'+part' if self.part else ''}"


def make_window_key(campaign: CampaignDir, *, node: str, part: bool = False) -> WindowKey:
    """The window of a campaign on a node."""
    return WindowKey(campaign=campaign.root, node=node, part=part)


@dataclass(frozen=True)
class WindowOffsets:
    """Where things are in the file."""

    num_tensors: int
    layout_nbytes: int
    slot_nbytes: int

    @property
    def tables_start(self) -> int:
        """Checksums and marks of slot 0, then of slot 1."""
        return mmap.PAGESIZE + self.layout_nbytes + -self.layout_nbytes % 8

    @property
    def table_nbytes(self) -> int:
        return self.num_tensors * (CHECKSUM_BYTES + 8)

    @property
    def head_nbytes(self) -> int:
        """All before the slots."""
        return _round_to_pages(self.tables_start + 2 * self.table_nbytes)

    @property
    def nbytes(self) -> int:
        return self.head_nbytes + 2 * self.slot_nbytes

    def checksums_slice(self, slot: int) -> slice:
        """The bytes of the checksums of a slot."""
        start = self.tables_start + slot * self.table_nbytes
        return slice(start, start + self.num_tensors * CHECKSUM_BYTES)

    def checksum_slice(self, slot: int, index: int) -> slice:
        """The bytes of the checksum of one tensor."""
        start = self.tables_start + slot * self.table_nbytes + index * CHECKSUM_BYTES
        return slice(start, start + CHECKSUM_BYTES)

    def mark_index(self, slot: int, index: int) -> int:
        """Index, in words of 8 bytes, of the mark that says what has been done with a tensor."""
        start = self.tables_start + slot * self.table_nbytes + self.num_tensors * CHECKSUM_BYTES
        return start // 8 + index


class UnusableWindowError(Exception):
    """There is no window of that name, or none that can be used."""


def make_window_file(path: Path, layout: TensorLayout, *, job: int) -> None:
    """A new window under its name, complete; WeightsError if memory is short."""
    layout_json = layout.to_json()
    offsets = WindowOffsets(
        num_tensors=len(layout.tensors),
        layout_nbytes=len(layout_json),
        slot_nbytes=max(_round_to_pages(layout.nbytes), mmap.PAGESIZE),
    )
    unfinished = _unfinished_path(path)
    fd = -1
    try:
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try_lock(fd, OPEN_LOCK, exclusive=False)
        os.posix_fallocate(fd, 0, offsets.nbytes)  # a page that cannot be had is an error now, not SIGBUS later
        head = (MAGIC, job, os.getpid(), len(layout_json), offsets.slot_nbytes, bytes.fromhex(layout.digest()))
        os.pwrite(fd, _HEAD.pack(*head), 0)
        os.pwrite(fd, layout_json, mmap.PAGESIZE)
        unfinished.rename(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise make_no_room_error(error, path, offsets.nbytes) from error
    finally:
        if fd >= 0:
            os.close(fd)


def make_no_room_error(error: OSError, path: Path, nbytes: int) -> WeightsError:
    """Says how much is wanted and how much there is."""
    free = ""
    with contextlib.suppress(OSError):
        facts = os.statvfs(path.parent)
        free = f", {facts.f_bavail * facts.f_frsize / 2**20:.1f} MiB are free there"
    return WeightsError(
        f"no window of {nbytes / 2**20:.1f} MiB (two versions) in {path.parent}: {error.strerror}{free}; "
        "weights go by files instead; enlarge it, or ask for nodes with more memory"
    )


def open_own_file(path: Path) -> int:
    """Open a file that is ours alone; what another user put there is never touched."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise UnusableWindowError from None
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


def identify_window(fd: int) -> tuple[int, TensorLayout, WindowOffsets]:
    """Job, layout and places of the window in `fd`; UnusableError if it is none."""
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
        raise UnusableWindowError
    _, job, _, layout_nbytes, slot_nbytes, digest = _HEAD.unpack(head)
    layout_json = os.pread(fd, min(layout_nbytes, os.fstat(fd).st_size), mmap.PAGESIZE)
    if xxhash.xxh3_128_digest(layout_json) != digest:
        raise UnusableWindowError
    layout = TensorLayout.from_json(layout_json)
    offsets = WindowOffsets(num_tensors=len(layout.tensors), layout_nbytes=layout_nbytes, slot_nbytes=slot_nbytes)
    if slot_nbytes < layout.nbytes or os.fstat(fd).st_size != offsets.nbytes:
        raise UnusableWindowError
    return job, layout, offsets


def take_writer_lock(fd: int, path: Path) -> None:
    """WeightsError if another process writes this window."""
    if not try_lock(fd, WRITER_LOCK, exclusive=True):
        pid = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))[2]
        raise WeightsError(
            f"{path} is being written by another process (made by {pid}): only one may publish on a node"
        )


def try_lock(fd: int, byte: int, *, exclusive: bool) -> bool:
    """Try to lock one byte of the file; such a lock belongs to the descriptor and ends with it."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_byte(fd: int, byte: int) -> None:
    """Let go now: memory that is still looked at keeps a copy of the descriptor, and with it the lock."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def remove_window_file(path: Path) -> None:
    """Remove the name, and that of one which was not complete; who has it mapped keeps it."""
    try:
        path.unlink(missing_ok=True)
        _unfinished_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise WeightsError(f"{path} cannot be removed ({error.strerror}): it belongs to somebody else") from error


def unlink_recorded_windows(job: JobDir) -> list[str]:
    """Remove every window of this host that a process of `job` made; for when those processes are gone."""
    removed = []
    for record in sorted(job.windows.glob("*")) if job.windows.is_dir() else []:
        path = Path(record.read_text())
        if path.name != record.name:  # not written to its end: the window was not made either
            continue
        own_files = [file for file in (path, _unfinished_path(path)) if is_own_file(file)]
        for file in own_files:
            file.unlink(missing_ok=True)
        if own_files:
            removed.append(path.name)
    return removed


def is_own_file(path: Path) -> bool:
    """Is it a file of this user? A link, or what another user put in its place, is left alone."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()


def _unfinished_path(path: Path) -> Path:
    """What a window is called until it is complete."""
    return path.with_name(path.name + UNFINISHED_SUFFIX)


def _round_to_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
