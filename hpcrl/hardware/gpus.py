"""The GPU catalogue (`GPU_CATALOGUE` of `GpuModel`): peak figures of common GPU types, for the planner.

Sites describe others themselves. `DEFAULT_SIMULATED_GPU` is the type that simulated engines imitate on CPUs.
"""

import msgspec


class GpuModel(msgspec.Struct, frozen=True, kw_only=True):
    """The peak figures of one device, from its vendor's data sheet."""

    name: str
    memory_gib: float
    bf16_tflops: float | None
    """Dense, without sparsity; fp16 for a GPU without bf16. None: not known."""
    memory_tb_per_s: float | None

    @property
    def has_speed(self) -> bool:
        """True if speeds can be estimated."""
        return self.bf16_tflops is not None and self.memory_tb_per_s is not None


GPU_CATALOGUE: dict[str, GpuModel] = {
    name: GpuModel(name=name, bf16_tflops=bf16_tflops, memory_tb_per_s=memory_tb_per_s, memory_gib=memory_gib)
    for name, bf16_tflops, memory_tb_per_s, memory_gib in (
        ("a100-40", 312, 1.56, 40),
        ("a100-64", 312, 1.64, 64),
        ("a100-80", 312, 2.0, 80),
        ("a30", 165, 0.933, 24),
        ("a40", 150, 0.696, 48),
        ("b200", 2250, 8.0, 180),
        ("gh200", 989, 4.0, 96),
        ("h100", 989, 3.35, 80),
        ("h20", 148, 4.0, 96),
        ("h200", 989, 4.8, 141),
        ("h800", 989, 3.35, 80),
        ("l4", 121, 0.3, 24),
        ("l40s", 362, 0.864, 48),
        ("mi210", 181, 1.6, 64),
        ("mi250x-gcd", 192, 1.6, 64),
        ("mi300a", 980, 5.3, 128),
        ("mi300x", 1307, 5.3, 192),
        ("v100-16", 125, 0.9, 16),
        ("v100-32", 125, 0.9, 32),
    )
}

DEFAULT_SIMULATED_GPU = "h100"
