"""Images of apptainer: a file is used in its place, one of a registry is pulled once for a node, into a cache.

    open_image        use an image: its file stays as it is meanwhile
    is_remote         whether an image is one of a registry
    pull_image        pull one of a registry into a file
    find_image_problem  why an image cannot be used, as far as that is known without pulling it
    ImageCache        the directory of a node's images, and how large it may become
    PULL_TIMEOUT_S, LOCK_POLL_S  constants

One task of each process pulls an image for all its episodes, whichever of them end meanwhile; a lock makes other
processes wait for it. The image that was not used for the longest
time is removed first; one that an episode uses is not removed.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from hpcrl.envs.isolation.sandbox import find_apptainer
from hpcrl.errors import EnvFault

PULL_TIMEOUT_S = 3600.0
LOCK_POLL_S = 0.2
_pulls: "dict[tuple[asyncio.AbstractEventLoop, Path], asyncio.Task[None]]" = {}
"""The pulls of this process that have not ended."""


class ImageCache(msgspec.Struct, frozen=True, kw_only=True):
    """The images of a node."""

    directory: str | None = None
    """The default is a directory of this user in TMPDIR, which should be a disk of the node."""
    max_gib: float = 50.0
    staged: str | None = None
    """A directory with images that were pulled before the job, which are used as they are."""

    def open_directory(self) -> Path:
        """Return the directory; raises EnvFault for one in which others could put images."""
        chosen = self.directory or str(Path(tempfile.gettempdir()) / f"hpcrl-images-{os.getuid()}")
        directory = Path(chosen)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = directory.stat()
        except OSError as error:
            raise EnvFault(f"image_cache = {chosen!r} cannot be used: {error}") from None
        if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise EnvFault(f"image_cache = {chosen!r} can be written by others: name a directory of yours, mode 0700")
        return directory


def is_remote(image: str) -> bool:
    """Return whether an image is pulled: docker://, oras://, library:// and the like."""
    return re.match(r"[a-z][a-z0-9+-]*://", image) is not None


def find_image_problem(image: str) -> str:
    """Return why an image cannot be used, as far as that is known without pulling it; "" if nothing is known."""
    return "" if is_remote(image) or Path(image).exists() else f"image = {image!r}: no such file or directory"


@contextlib.asynccontextmanager
async def open_image(image: str, cache: ImageCache) -> AsyncIterator[str]:
    """Yield the path of an image, which stays there until the end of the block."""
    if problem := find_image_problem(image):
        raise EnvFault(problem)
    if not is_remote(image):
        yield image
        return
    name = f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.sif"
    if cache.staged is not None and (staged := Path(cache.staged) / name).is_file():
        yield str(staged)
        return
    path = await asyncio.to_thread(cache.open_directory) / name
    while (descriptor := _hold_image(path)) is None:
        await asyncio.shield(_join_pull(image, path, max_bytes=int(cache.max_gib * 2**30)))
    try:
        yield str(path)
    finally:
        os.close(descriptor)


def _join_pull(image: str, path: Path, *, max_bytes: int) -> "asyncio.Task[None]":
    """Return the task that pulls an image: the one that runs, else a new one, which ends with the event loop."""
    key = (asyncio.get_running_loop(), path)
    if (pull := _pulls.get(key)) is None:
        pull = _pulls[key] = asyncio.create_task(_add_image(image, path, max_bytes=max_bytes))
        pull.add_done_callback(lambda task: _forget_pull(key, task))
    return pull


def _forget_pull(key: tuple[asyncio.AbstractEventLoop, Path], pull: "asyncio.Task[None]") -> None:
    """Let the next episode pull again; a failure is that of those that wait, of whom none may be left."""
    del _pulls[key]
    if not pull.cancelled():
        pull.exception()


async def _add_image(image: str, path: Path, *, max_bytes: int) -> None:
    """Pull an image unless another process has, and make room for it."""
    async with _lock(path.with_suffix(".lock")):
        if not path.exists():
            await pull_image(image, path)
            await asyncio.to_thread(_evict_images, path.parent, max_bytes=max_bytes, kept=path)


def _hold_image(path: Path) -> int | None:
    """Return a descriptor that keeps an image from being removed; None if it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # held against for no longer than a removal takes
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return None
    os.utime(path)
    return descriptor


async def pull_image(image: str, path: Path) -> None:
    """Pull an image of a registry with apptainer; raises EnvFault if that fails."""
    for old in path.parent.glob(f"{path.stem}.*.part"):  # of a process that was killed
        old.unlink(missing_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        process = await asyncio.create_subprocess_exec(
            *(find_apptainer() or "apptainer", "--silent", "pull", "--force", "--disable-cache", str(part), image),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {name: str(path.parent) for name in ("APPTAINER_TMPDIR", "SINGULARITY_TMPDIR")},
        )
    except OSError as error:
        raise EnvFault(f"image = {image!r} cannot be pulled: apptainer: {error}") from None
    try:
        async with asyncio.timeout(PULL_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        raise EnvFault(f"image = {image!r} was not pulled in {PULL_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
            part.unlink(missing_ok=True)
    if process.returncode != 0 or not part.exists():
        part.unlink(missing_ok=True)
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][-300:]
        raise EnvFault(f"image = {image!r} cannot be pulled: {last or f'apptainer ended with {process.returncode}'}")
    part.rename(path)


def _evict_images(directory: Path, *, max_bytes: int, kept: Path) -> None:
    """Remove the images that were not used for the longest time, until the rest is small enough."""
    images = sorted(directory.glob("*.sif"), key=lambda path: path.stat().st_mtime)
    num_bytes = sum(path.stat().st_size for path in images)
    for path in images:
        if num_bytes <= max_bytes:
            return
        size_bytes = path.stat().st_size
        if path != kept and _remove_unused(path):
            num_bytes -= size_bytes


def _remove_unused(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
    return True


@contextlib.asynccontextmanager
async def _lock(path: Path) -> AsyncIterator[None]:
    """Hold a lock on a file; the kernel releases it when its process ends."""
    with _open_lock(path) as descriptor:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_POLL_S)
        yield


@contextlib.contextmanager
def _open_lock(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
