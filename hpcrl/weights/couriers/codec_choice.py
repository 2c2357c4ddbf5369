"""Full or delta? What a site wants, what the link and the codec were measured to do, and what versions share.

Pace    one for a sender: told what every transfer took, asked before the next

A delta pays where coding is quicker than the link. With "auto", the first versions go in full and tell how quick the
link is; then a sample of a version tells how much of it changes and what coding takes; then every delta does.
"""

import time
from dataclasses import dataclass
from typing import Literal

from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.couriers.delta_codec import CodecChoice
from hpcrl.weights.layout import TensorLayout

CodecSetting = Literal["auto", "full", "delta"]
"""What a site may want."""
NUM_MEASURED_VERSIONS = 2
"""Versions in full that tell how quick the link is; with the first one, receivers make their windows."""
VERSIONS_PER_SAMPLE = 16
"""So many versions in full, and it is looked anew whether a delta would pay."""


@dataclass
class CodecChooser:
    """What was measured in this life of the couriers."""

    setting: CodecSetting
    link_nbytes_per_s: float | None = None
    """The quickest that a version went in full."""
    delta_nbytes: int | None = None
    """What a delta has, by the newest look."""
    delta_s: float = 0.0
    """What coding it takes, on both sides."""
    _num_full: int = 0
    _num_full_since_sample: int = VERSIONS_PER_SAMPLE

    def choose(self, layout: TensorLayout, old: memoryview, new: memoryview) -> CodecChoice:
        """For a version whose base the receivers have."""
        if self.setting != "auto":
            return CodecChoice(self.setting, f'site.mpi.codec = "{self.setting}"')
        if self.link_nbytes_per_s is None or self._num_full < NUM_MEASURED_VERSIONS:
            return CodecChoice("full", "the link is not measured yet")
        if self._num_full_since_sample >= VERSIONS_PER_SAMPLE:
            self._take_sample(layout, old, new)
        return delta_codec.choose_codec(
            full_nbytes=layout.nbytes,
            delta_nbytes=self.delta_nbytes,
            delta_s=self.delta_s,
            link_nbytes_per_s=self.link_nbytes_per_s,
        )

    def record_full(self, nbytes: int, wall_s: float) -> None:
        """A version went in full."""
        self.link_nbytes_per_s = max(self.link_nbytes_per_s or 0.0, nbytes / wall_s)
        self._num_full += 1
        self._num_full_since_sample += 1

    def record_delta(self, nbytes: int, wall_s: float) -> None:
        """A delta went; what the link does not account for, coding has taken."""
        self.delta_nbytes = nbytes
        self.delta_s = max(wall_s - nbytes / self.link_nbytes_per_s, 0.0) if self.link_nbytes_per_s else wall_s
        self._num_full_since_sample = 0

    def record_oversize(self) -> None:
        """A delta would have had as many bytes as the version."""
        self.delta_nbytes = None
        self._num_full_since_sample = 0

    def _take_sample(self, layout: TensorLayout, old: memoryview, new: memoryview) -> None:
        """At some pieces all over the version; the other side is taken to need as long as this one."""
        start = time.monotonic()
        share, sampled_nbytes = delta_codec.sample_delta_share(old, new, layout)
        self.delta_nbytes = round(share * layout.nbytes) if share < 1 else None
        self.delta_s = 2 * (time.monotonic() - start) * layout.nbytes / max(sampled_nbytes, 1)
        self._num_full_since_sample = 0
