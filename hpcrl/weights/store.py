"""Versions of the weights: published once, complete or absent, never going back.

    WeightSource  what engines see
    WeightStore   what trainers see besides
    FileStore     on a filesystem that both see; survives kill -9, garbage and a full disk
    WindowStore   in the shared memory of a node (hpcrl.weights.window); two versions, no copies for readers
    MemoryStore   in one process
    Newest        a source that asks several

Who only wants to know which versions there are asks hpcrl.weights.versions, which imports nothing heavy.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hpcrl.errors import WeightsError
from hpcrl.files import discard, private_dir, publish, staged, sync_file
from hpcrl.rundir import JobDir
from hpcrl.weights import tensor_file
from hpcrl.weights.checksums import for_each_tensor
from hpcrl.weights.layout import Layout, Placed
from hpcrl.weights.versions import (
    Manifest,
    check_newer,
    listed,
    newest_manifest,
    read_manifest,
    tensors_file,
    version_dir,
)
from hpcrl.weights.window import Key, Window

__all__ = ["FileStore", "Manifest", "MemoryStore", "Newest", "WeightSource", "WeightStore", "WindowStore"]

Tensors = dict[str, torch.Tensor]
CHUNK_BYTES = 512 << 10
"""Copied and hashed: what was written is still in a core's cache when it is read again."""
warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor is anything written to it


class WeightSource(Protocol):
    """Where engines find versions."""

    def newest(self) -> Manifest | None:
        """The newest complete version; cheap enough to ask many times a second."""

    def load(self, version: int) -> Tensors:
        """The tensors of a version, checked against its manifest; they are read only, and stay."""

    def reading(self, version: int) -> AbstractContextManager[Tensors]:
        """The same for the length of a block, without a copy where there need be none.

        WeightsError on the way out: what was read may be of another version, so read the newest again.
        """

    def still(self, version: int) -> bool:
        """In the block of `reading`: is it whole at this moment, so that what was read is right?"""


class WeightStore(WeightSource, Protocol):
    """Where the trainer leaves new versions."""

    def publish(self, tensors: Tensors, *, version: int, step: int) -> Manifest:
        """Add a version, which must be newer than all others."""

    def prune(self, *, keep: int) -> None:
        """Drop all but the newest `keep` versions."""


class FileStore:
    """One directory a version (see hpcrl.weights.versions); one process publishes, any number read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def publish(self, tensors: Tensors, *, version: int, step: int) -> Manifest:
        check_newer(version, than=max(listed(self.directory), default=None))
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        manifest = _manifest(on_cpu, version=version, step=step)
        with self._making(version, nbytes=sum(tensor.nbytes for tensor in on_cpu.values())) as temporary:
            _save(on_cpu, temporary / tensors_file(self.directory, version).name)
            publish(temporary / "manifest.json", msgspec.json.encode(manifest))
        return manifest

    def publish_each(self, layout: Layout, tensors: Iterable[memoryview], *, version: int, step: int) -> Manifest:
        """The same for tensors that come one after the other, in the layout's order: no more than one is in memory."""
        check_newer(version, than=max(listed(self.directory), default=None))
        with self._making(version, nbytes=layout.nbytes) as temporary:
            path = temporary / tensors_file(self.directory, version).name
            checksums = tensor_file.write(layout, tensors, path)
            manifest = Manifest(version=version, step=step, checksums=checksums, created=time.time())
            publish(temporary / "manifest.json", msgspec.json.encode(manifest))
        return manifest

    def newest(self) -> Manifest | None:
        return newest_manifest(self.directory)

    def load(self, version: int) -> Tensors:
        manifest = read_manifest(self.directory, version)
        path = tensors_file(self.directory, version)
        try:
            tensors: Tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read ({error}): remove {path.parent}, or take the newest") from error
        _verify(tensors, manifest, where=str(path))
        return tensors

    @contextmanager
    def reading(self, version: int) -> Iterator[Tensors]:
        yield self.load(version)

    def still(self, version: int) -> bool:
        return True  # it was copied out of the file

    def prune(self, *, keep: int) -> None:
        for version in listed(self.directory)[: -max(keep, 1)]:
            discard(version_dir(self.directory, version))

    @contextmanager
    def _making(self, version: int, *, nbytes: int) -> Iterator[Path]:
        """A directory that becomes the version's when the block ends well."""
        private_dir(self.directory)
        self._drop_torn()
        try:
            with staged(version_dir(self.directory, version)) as temporary:
                temporary.mkdir(mode=0o700)
                yield temporary
        except (OSError, SafetensorError, RuntimeError) as error:
            raise WeightsError(
                f"version {version} ({nbytes / 2**20:.1f} MiB) cannot be written to {self.directory}: {error}; "
                "the versions before it are untouched"
            ) from error

    def _drop_torn(self) -> None:
        """Remove what a publisher left that was killed: only one publishes at a time, so nobody is writing it."""
        for path in self.directory.glob(".v*.tmp"):
            discard(path)


class MemoryStore:
    """Versions in one process, for tests and for a trainer and an engine that share it."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[Manifest, Tensors]] = {}

    def publish(self, tensors: Tensors, *, version: int, step: int) -> Manifest:
        check_newer(version, than=max(self._versions, default=None))
        copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        manifest = _manifest(copies, version=version, step=step)
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


class WindowStore:
    """The window of a node; its trainer makes it with the first version, and readers find it when it is there."""

    def __init__(self, key: Key, *, job: JobDir) -> None:
        self._key = key
        self._job = job
        self._window: Window | None = None

    # ---- the trainer's end

    def publish(self, tensors: Tensors, *, version: int, step: int) -> Manifest:
        return self.commit(self.stage(tensors, version=version, step=step))

    def stage(self, tensors: Tensors, *, version: int, step: int) -> list[bytes]:
        """Copy the weights into the slot; the tensors may change afterwards. The checksums of what lies there now."""
        layout = Layout.of(tensors)
        if self._window is None or self._window.end != "writer":
            self.close()
            self._window = Window.create(self._key, layout, job=self._job)
        self._window.layout.check_same(layout, ours="the window", theirs="the trainer")
        slot = self._window.begin(version, step=step)
        return _copy(tensors, slot, layout)

    def commit(self, sums: list[bytes]) -> Manifest:
        """Make visible what was staged with these checksums; safe in another thread than `stage`."""
        assert self._window is not None, "stage comes before commit"
        names = (tensor.name for tensor in self._window.layout.tensors)
        return self._window.commit({name: one.hex() for name, one in zip(names, sums, strict=True)}, sums=sums)

    def made(self) -> int | None:
        """The newest version that ever came into the window."""
        manifest = self.newest()
        return None if manifest is None else manifest.version

    def saver(self, files: FileStore, *, version: int, step: int) -> Callable[[], object]:
        """What writes a version to files once it is committed."""

        def save() -> None:
            with self.reading(version) as tensors:
                files.publish(tensors, version=version, step=step)

        return save

    def prune(self, *, keep: int) -> None:
        """Nothing to do: a window holds two versions."""

    # ---- both ends

    def newest(self) -> Manifest | None:
        window = self._current()
        return None if window is None else window.newest()

    def load(self, version: int) -> Tensors:
        with self.reading(version) as tensors:
            return {name: tensor.clone() for name, tensor in tensors.items()}

    @contextmanager
    def reading(self, version: int) -> Iterator[Tensors]:
        window = self._current()
        if window is None:
            raise WeightsError(f"version {version} is not here (there: none): {self._key.path} does not exist")
        with window.reading(version) as slot:
            yield tensors_in(slot, window.layout)

    def still(self, version: int) -> bool:
        return self._window is not None and self._window.still(version)

    def close(self) -> None:
        """Let go of the window; its name stays."""
        if self._window is not None:
            self._window.close()
            self._window = None

    def unlink(self) -> None:
        """Remove the window's name; for the trainer at its end."""
        if self._window is not None and self._window.end == "writer":
            self._window.unlink()

    def _current(self) -> Window | None:
        """The window of that name, opened anew if it has been replaced."""
        if self._window is None or self._window.end != "writer":
            self._window = Window.renewed(self._window, self._key, job=self._job.number)
        return self._window


class Newest:
    """Asks several sources, the fastest first; a version is read from the first that has it."""

    def __init__(self, *sources: WeightSource) -> None:
        self._sources = sources
        self._reads_from = sources[-1]

    def newest(self) -> Manifest | None:
        found = [manifest for source in self._sources if (manifest := source.newest()) is not None]
        return max(found, key=lambda manifest: manifest.version, default=None)

    def load(self, version: int) -> Tensors:
        return self._holder(version).load(version)

    def reading(self, version: int) -> AbstractContextManager[Tensors]:
        self._reads_from = self._holder(version)
        return self._reads_from.reading(version)

    def still(self, version: int) -> bool:
        return self._reads_from.still(version)

    def _holder(self, version: int) -> WeightSource:
        for source in self._sources[:-1]:
            if (manifest := source.newest()) is not None and manifest.version == version:
                return source
        return self._sources[-1]


def tensors_in(slot: memoryview, layout: Layout) -> Tensors:
    """The tensors in a slot, without a copy; they are valid as long as the slot is."""
    flat = torch.frombuffer(slot, dtype=torch.uint8) if layout.nbytes else torch.empty(0, dtype=torch.uint8)
    return {
        tensor.name: flat[tensor.offset : tensor.offset + tensor.nbytes]
        .view(getattr(torch, tensor.dtype))
        .view(tensor.shape)
        for tensor in layout.tensors
    }


def _copy(tensors: Tensors, slot: memoryview, layout: Layout) -> list[bytes]:
    """Copy all tensors into a slot on a few threads; the checksums of what lies there now."""
    sums = [b""] * len(layout.tensors)
    flat = torch.frombuffer(slot, dtype=torch.uint8) if layout.nbytes else torch.empty(0, dtype=torch.uint8)

    def copy(index: int, placed: Placed) -> None:
        target = flat[placed.offset : placed.offset + placed.nbytes]
        source = tensors[placed.name].detach()
        if source.device.type == "cpu" and source.is_contiguous():
            sums[index] = _copy_and_hash(source.reshape(-1).view(torch.uint8).numpy(), target.numpy())
        else:
            target.view(source.dtype).view(source.shape).copy_(source)
            sums[index] = xxhash.xxh3_128_digest(target.numpy().data)

    for_each_tensor(layout, copy)
    return sums


def _copy_and_hash(source: Any, target: Any) -> bytes:
    """Copy bytes; the checksum of what is there now, taken piece by piece while the cache holds it."""
    there = xxhash.xxh3_128()
    for start in range(0, len(source), CHUNK_BYTES):
        piece = target[start : start + CHUNK_BYTES]
        np.copyto(piece, source[start : start + CHUNK_BYTES])
        there.update(piece)
    return there.digest()


def _manifest(tensors: Tensors, *, version: int, step: int) -> Manifest:
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    return Manifest(version=version, step=step, checksums=checksums, created=time.time())


def _checksum(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def _save(tensors: Tensors, path: Path) -> None:
    save_file(tensors, path)
    path.chmod(0o600)
    sync_file(path)


def _verify(tensors: Tensors, manifest: Manifest, *, where: str) -> None:
    if odd := sorted(tensors.keys() ^ manifest.checksums.keys()):
        raise WeightsError(f"{where}: tensor {odd[0]!r} is in the file or in the manifest, but not in both")
    for name, tensor in tensors.items():
        if (seen := _checksum(tensor)) != manifest.checksums[name]:
            raise WeightsError(
                f"{where}: tensor {name!r} has checksum {seen}, its manifest says {manifest.checksums[name]}: "
                "the file is damaged; take another version"
            )
