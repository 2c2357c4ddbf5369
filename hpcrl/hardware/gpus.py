"""The GPU catalogue (`GPU_CATALOGUE` of `GpuModel`): peak figures of common GPU types, for the planner.

Sites describe others themselves. `RooflineFit` has the coefficients between peak figures and real servers.
`DEFAULT_SIMULATED_GPU` is the type that simulated engines imitate on CPUs. `guess_maker` and `guess_architecture` know
the names by which sites call GPUs.
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Coefficient = Annotated[float, Meta(ge=0)]
GpuMaker = Literal["nvidia", "amd"]
Architecture = Literal["x86_64", "aarch64"]
_AMD_NAME = re.compile(r"(?<![a-z])(amd|instinct|radeon|mi\d)", re.IGNORECASE)
_GRACE_NAME = re.compile(r"(?<![a-z])g[bh]\d", re.IGNORECASE)
"""The names of NVIDIA's GPUs that are on nodes with its ARM CPUs, such as gh200 and gb200."""
_NAMES_WITHOUT_FP8 = ("v100-", "a100-", "a30", "a40", "mi210", "mi250x-")


class RooflineFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The coefficients between the roofline and real servers; the defaults are fitted on published H100 figures.

    `hpcrl calibrate` fits them to other measurements.
    """

    layer_s: Coefficient = 6.8e-5
    """Time per layer of every step, whatever the batch: launching kernels."""
    expert_layer_s: Coefficient = 2.5e-5
    """The same for experts, in addition: routing and dispatch."""
    hop_s: Coefficient = 1.2e-6
    """The same for sums over the GPUs of an engine, for each doubling of their number."""
    read: Coefficient = 1.1
    """Time of reading weights, relative to full bandwidth."""
    kv: Coefficient = 1.08
    """Time of reading KV, relative to full bandwidth."""
    compute: Coefficient = 1.07
    """Time of a decode step's arithmetic, relative to peak; the inverse of its efficiency."""
    prefill: Coefficient = 0.92
    """Time of prefill's arithmetic, relative to peak."""
    link: Coefficient = 7.4
    """Time of the sums over the GPUs of an engine, relative to one copy of their operands over the link."""
    train: Coefficient = 2.0
    """Time of a training step's arithmetic, relative to peak, without what ranks send each other: an assumption, not a
    fit. A trainer hardly reaches more than half of the peak."""


DEFAULT_FIT = RooflineFit()


class GpuModel(msgspec.Struct, frozen=True, kw_only=True):
    """The peak figures of one device, from its vendor's data sheet."""

    name: str
    memory_gib: float
    bf16_tflops: float | None
    """Dense, without sparsity; fp16 for a GPU without bf16. None: not known."""
    memory_tb_per_s: float | None
    link_gb_per_s: float | None = None
    """The bandwidth to the other GPUs of its node, both directions together. None: not known, and not counted."""
    maker: GpuMaker | None = None
    """None: the one that its name shows."""
    fit: RooflineFit = DEFAULT_FIT

    @property
    def has_bf16(self) -> bool:
        """True unless it is known to compute in float16 in place of bfloat16."""
        return not self.name.startswith("v100-")

    @property
    def has_fp8(self) -> bool:
        """True unless it is known to have no products in FP8: it then reads weights in FP8 and computes in bf16."""
        return not self.name.startswith(_NAMES_WITHOUT_FP8)

    @property
    def has_speed(self) -> bool:
        """True if speeds can be estimated."""
        return self.bf16_tflops is not None and self.memory_tb_per_s is not None


GPU_CATALOGUE: dict[str, GpuModel] = {
    name: GpuModel(
        name=name,
        bf16_tflops=bf16_tflops,
        memory_tb_per_s=memory_tb_per_s,
        memory_gib=memory_gib,
        link_gb_per_s=link_gb_per_s,
    )
    for name, bf16_tflops, memory_tb_per_s, memory_gib, link_gb_per_s in (
        ("a100-40", 312, 1.56, 40, 600),
        ("a100-64", 312, 1.64, 64, 600),
        ("a100-80", 312, 2.0, 80, 600),
        ("a30", 165, 0.933, 24, None),
        ("a40", 150, 0.696, 48, None),
        ("b200", 2250, 8.0, 180, 1800),
        ("gh200", 989, 4.0, 96, 900),
        ("h100", 989, 3.35, 80, 900),
        ("h20", 148, 4.0, 96, 900),
        ("h200", 989, 4.8, 141, 900),
        ("h800", 989, 3.35, 80, 400),
        ("l4", 121, 0.3, 24, 64),
        ("l40s", 362, 0.864, 48, 64),
        ("mi210", 181, 1.6, 64, None),
        ("mi250x-gcd", 192, 1.6, 64, None),
        ("mi300a", 980, 5.3, 128, None),
        ("mi300x", 1307, 5.3, 192, 896),
        ("v100-16", 125, 0.9, 16, 300),
        ("v100-32", 125, 0.9, 32, 300),
    )
}

DEFAULT_SIMULATED_GPU = "h100"


def guess_maker(name: str) -> GpuMaker:
    """Return the maker of a GPU by its name, such as "AMD-MI300A"."""
    return "amd" if _AMD_NAME.search(name) else "nvidia"


def guess_architecture(name: str) -> Architecture:
    """Return the architecture of the CPUs beside a GPU by its name."""
    return "aarch64" if _GRACE_NAME.search(name) else "x86_64"
