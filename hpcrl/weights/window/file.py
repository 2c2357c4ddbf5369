"""The file of a window: its name, content, locks and removal, and the checksums of a slot's tensors.

    WindowKey, make_window_key               user, campaign and node of a window
    WindowOffsets                            where everything is in the file
    make_window_file, make_no_room_error     a new window under its name, complete - the error if memory is short
    open_own_file, is_own_file               files of this user only
    identify_window, UnusableWindowError     job and layout of an open window - there is none, or it is not usable
    take_writer_lock                         the lock of the writer; others are of users of a slot and of open windows
    remove_window_file                       remove a window's name
    unlink_recorded_windows                  remove the windows of a job whose processes have ended
    compute_checksum                         the xxh3 of one tensor in a slot
    process_tensors, split_by_bytes          process all tensors on a few threads, in shares of about equal size

The file is a header page, the layout, the checksums and marks of each slot's tensors, then the two slots.
"""

import contextlib
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
from hpcrl.system.byte_locks import try_lock
from hpcrl.weights.checksum import hash_bytes
from hpcrl.weights.layout import TensorLayout, TensorSlot

CHECKSUM_BYTES = 16
NUM_HASH_THREADS = min(4, len(os.sched_getaffinity(0)))
MIN_THREADED_BYTES = 4 << 20
"""Below this, threads cost more than they save."""


def compute_checksum(data: memoryview, tensor: TensorSlot) -> bytes:
    """Compute the checksum of one tensor in a slot."""
    return hash_bytes(data[tensor.offset : tensor.offset + tensor.nbytes])


def process_tensors(layout: TensorLayout, process: Callable[[int, TensorSlot], None]) -> None:
    """Process all tensors on a few threads, each with its share of the bytes; the first error is raised."""
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
    """Split the tensors' indices into shares of about the same number of bytes, the largest tensors first."""
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
"""Shared by all processes that have the window open; if it is free, they have ended (`shm_cleanup`)."""
UNFINISHED_SUFFIX = ".new"
"""Suffix of a window's name until it is complete."""
SLOT_HEAD_OFFSETS = (1024, 2048)
"""Offsets of the slots' headers in the header page."""


@dataclass(frozen=True)
class WindowKey:
    """The identity of a window: one per user, campaign and node."""

    campaign: Path
    node: str
    directory: Path = SHARED_MEMORY
    part: bool = False
    """The window holds the node's part of a trainer on several nodes; no engine reads it."""

    @property
    def path(self) -> Path:
        """The window's file; its name differs for campaigns of one name in two homes."""
        root = self.campaign.resolve()
        suffix = f"{root.name[:80]}-{xxhash.xxh3_64_hexdigest(bytes(root))}-{self.node}"
        return self.directory / f"hpcrl-{os.getuid()}-{suffix}{'+part' if self.part else ''}"


def make_window_key(campaign: CampaignDir, *, node: str, part: bool = False) -> WindowKey:
    """Make the key of a campaign's window on a node."""
    return WindowKey(campaign=campaign.root, node=node, part=part)


@dataclass(frozen=True)
class WindowOffsets:
    """The offsets of everything in the file."""

    num_tensors: int
    layout_nbytes: int
    slot_nbytes: int

    @property
    def tables_start(self) -> int:
        """The start of checksums and marks of slot 0, then of slot 1."""
        return mmap.PAGESIZE + self.layout_nbytes + -self.layout_nbytes % 8

    @property
    def table_nbytes(self) -> int:
        return self.num_tensors * (CHECKSUM_BYTES + 8)

    @property
    def head_nbytes(self) -> int:
        """The bytes before the slots."""
        return _round_to_pages(self.tables_start + 2 * self.table_nbytes)

    @property
    def nbytes(self) -> int:
        return self.head_nbytes + 2 * self.slot_nbytes

    def checksums_slice(self, slot: int) -> slice:
        """Return the bytes of the checksums of a slot."""
        start = self.tables_start + slot * self.table_nbytes
        return slice(start, start + self.num_tensors * CHECKSUM_BYTES)

    def checksum_slice(self, slot: int, index: int) -> slice:
        """Return the bytes of the checksum of one tensor."""
        start = self.tables_start + slot * self.table_nbytes + index * CHECKSUM_BYTES
        return slice(start, start + CHECKSUM_BYTES)

    def mark_index(self, slot: int, index: int) -> int:
        """Return the index, in words of 8 bytes, of the mark that records what has been done with a tensor."""
        start = self.tables_start + slot * self.table_nbytes + self.num_tensors * CHECKSUM_BYTES
        return start // 8 + index


class UnusableWindowError(Exception):
    """A window of that name does not exist, or cannot be used."""


def make_window_file(path: Path, layout: TensorLayout, *, job: int) -> None:
    """Create a window under its name, complete; WeightsError if memory is short."""
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
        os.posix_fallocate(fd, 0, offsets.nbytes)  # a missing page is an error now, not SIGBUS later
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
    """Make an error that reports how much memory is needed and how much is free."""
    free = ""
    with contextlib.suppress(OSError):
        facts = os.statvfs(path.parent)
        free = f", {facts.f_bavail * facts.f_frsize / 2**20:.1f} MiB are free there"
    return WeightsError(
        f"no window of {nbytes / 2**20:.1f} MiB (two versions) in {path.parent}: {error.strerror}{free}; "
        "weights are sent by files instead; enlarge it, or request nodes with more memory"
    )


def open_own_file(path: Path) -> int:
    """Open a file that only this user can access; a file of another user is never touched."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise UnusableWindowError from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be opened ({error.strerror}): another user has this name") from error
    facts = os.fstat(fd)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        os.close(fd)
        raise WeightsError(
            f"{path} belongs to user {facts.st_uid} with mode {facts.st_mode & 0o777:o}, and must be ours with 600: "
            "remove it if it is not a trap"
        )
    return fd


def identify_window(fd: int) -> tuple[int, TensorLayout, WindowOffsets]:
    """Return job, layout and offsets of the window in `fd`; UnusableWindowError if it is not a window."""
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
    """Lock the window for writing; WeightsError if another process writes it."""
    if not try_lock(fd, WRITER_LOCK, exclusive=True):
        pid = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))[2]
        raise WeightsError(
            f"{path} is being written by another process (made by {pid}): only one may publish on a node"
        )


def remove_window_file(path: Path) -> None:
    """Remove the name, and that of an incomplete window; a process that has the window mapped keeps it."""
    try:
        path.unlink(missing_ok=True)
        _unfinished_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise WeightsError(f"{path} cannot be removed ({error.strerror}): it belongs to another user") from error


def unlink_recorded_windows(job: JobDir) -> list[str]:
    """Remove every window of this host that a process of `job` created, after those processes have ended."""
    removed = []
    for record in sorted(job.windows.glob("*")) if job.windows.is_dir() else []:
        path = Path(record.read_text())
        if path.name != record.name:  # the record is incomplete: the window was not created either
            continue
        own_files = [file for file in (path, _unfinished_path(path)) if is_own_file(file)]
        for file in own_files:
            file.unlink(missing_ok=True)
        if own_files:
            removed.append(path.name)
    return removed


def is_own_file(path: Path) -> bool:
    """Return True if it is a file of this user; a link, or another user's file in its place, is left alone."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()


def _unfinished_path(path: Path) -> Path:
    """Return the name of a window until it is complete."""
    return path.with_name(path.name + UNFINISHED_SUFFIX)


def _round_to_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
