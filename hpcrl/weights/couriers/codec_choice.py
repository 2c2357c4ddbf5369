"""Choose full or delta by the site's setting, measured speeds of link and codec, and the share of changed values.

    CodecChooser  one for a sender: every transfer is recorded, and the codec chosen before the next

A delta is worthwhile if coding is faster than the link. With "auto", the first versions are sent in full, which
measures the link; then a sample of a version measures how much of it changes and the time for coding; then every
delta does.
"""

import time
from dataclasses import dataclass

from hpcrl.config.site import CodecSetting
from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.couriers.delta_codec import CodecChoice
from hpcrl.weights.layout import TensorLayout

NUM_MEASURED_VERSIONS = 2
"""Full versions that measure the link; during the first one, receivers create their windows."""
VERSIONS_PER_SAMPLE = 16
"""After this many full versions, a new sample shows if a delta would be faster."""


@dataclass
class CodecChooser:
    """The measurements of this run of the couriers."""

    setting: CodecSetting
    link_nbytes_per_s: float | None = None
    """The highest speed of a full version."""
    delta_nbytes: int | None = None
    """Size of a delta, by the newest sample or delta."""
    delta_s: float = 0.0
    """Time to encode and apply it, on both sides."""
    _num_full: int = 0
    _num_full_since_sample: int = VERSIONS_PER_SAMPLE

    def choose(self, layout: TensorLayout, old: memoryview, new: memoryview) -> CodecChoice:
        """Choose the codec of a version whose base the receivers have."""
        if self.setting != "auto":
            return CodecChoice(self.setting, f'site.mpi.codec = "{self.setting}"')
        if self.link_nbytes_per_s is None or self._num_full < NUM_MEASURED_VERSIONS:
            return CodecChoice("full", "the link has not been measured yet")
        if self._num_full_since_sample >= VERSIONS_PER_SAMPLE:
            self._take_sample(layout, old, new)
        return delta_codec.choose_codec(
            full_nbytes=layout.nbytes,
            delta_nbytes=self.delta_nbytes,
            delta_s=self.delta_s,
            link_nbytes_per_s=self.link_nbytes_per_s,
        )

    def record_full(self, nbytes: int, wall_s: float) -> None:
        """Record that a version was sent in full."""
        self.link_nbytes_per_s = max(self.link_nbytes_per_s or 0.0, nbytes / wall_s)
        self._num_full += 1
        self._num_full_since_sample += 1

    def record_delta(self, nbytes: int, wall_s: float) -> None:
        """Record that a delta was sent; the time beyond the link's is that of coding."""
        self.delta_nbytes = nbytes
        self.delta_s = max(wall_s - nbytes / self.link_nbytes_per_s, 0.0) if self.link_nbytes_per_s else wall_s
        self._num_full_since_sample = 0

    def record_oversize(self) -> None:
        """Record that a delta would be as large as the version."""
        self.delta_nbytes = None
        self._num_full_since_sample = 0

    def _take_sample(self, layout: TensorLayout, old: memoryview, new: memoryview) -> None:
        """Encode a few chunks from all over the version; the receiver is assumed to need the same time."""
        start = time.monotonic()
        share, sampled_nbytes = delta_codec.sample_delta_share(old, new, layout)
        self.delta_nbytes = round(share * layout.nbytes) if share < 1 else None
        self.delta_s = 2 * (time.monotonic() - start) * layout.nbytes / max(sampled_nbytes, 1)
        self._num_full_since_sample = 0
