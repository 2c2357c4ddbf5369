"""Weight versions as safetensors files on a shared filesystem; survives kill -9, garbage and a full disk."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from hpcrl.errors import WeightsError
from hpcrl.system.files import discard, private_dir, publish, staged
from hpcrl.weights import tensor_file
from hpcrl.weights.layout import Layout
from hpcrl.weights.store import Tensors, _checksums, _manifest, _save, _verify
from hpcrl.weights.versions import (
    Manifest,
    WeightVersion,
    check_newer,
    listed,
    newest_manifest,
    read_manifest,
    tensors_file,
    version_dir,
)


class FileStore:
    """One directory a version (see hpcrl.weights.versions); one process publishes, any number read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def publish(self, tensors: Tensors, weight_version: WeightVersion) -> Manifest:
        version = weight_version.version
        check_newer(version, than=max(listed(self.directory), default=None))
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        manifest = _manifest(weight_version, _checksums(on_cpu))
        with self._making(version, nbytes=sum(tensor.nbytes for tensor in on_cpu.values())) as temporary:
            _save(on_cpu, temporary / tensors_file(self.directory, version).name)
            publish(temporary / "manifest.json", msgspec.json.encode(manifest))
        return manifest

    def publish_each(self, layout: Layout, tensors: Iterable[memoryview], weight_version: WeightVersion) -> Manifest:
        """The same for tensors that come one after the other, in the layout's order: no more than one is in memory."""
        version = weight_version.version
        check_newer(version, than=max(listed(self.directory), default=None))
        with self._making(version, nbytes=layout.nbytes) as temporary:
            path = temporary / tensors_file(self.directory, version).name
            checksums = tensor_file.write(layout, tensors, path)
            manifest = _manifest(weight_version, checksums)
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
