"""The GPU catalogue (`GPU_CATALOGUE` of `GpuModel`): peak figures of each GPU type, for the planner.

`DEFAULT_SIMULATED_GPU` is the type that simulated engines imitate on CPUs.
"""

import msgspec


class GpuModel(msgspec.Struct, frozen=True, kw_only=True):
    """The peak figures of one device, from its vendor's data sheet."""

    bf16_tflops: float
    """Dense, without sparsity."""
    memory_tb_per_s: float
    memory_gib: float


GPU_CATALOGUE: dict[str, GpuModel] = {
    "a100-40": GpuModel(bf16_tflops=312, memory_tb_per_s=1.56, memory_gib=40),
    "a100-64": GpuModel(bf16_tflops=312, memory_tb_per_s=1.64, memory_gib=64),
    "a100-80": GpuModel(bf16_tflops=312, memory_tb_per_s=2.0, memory_gib=80),
    "b200": GpuModel(bf16_tflops=2250, memory_tb_per_s=8.0, memory_gib=180),
    "gh200": GpuModel(bf16_tflops=989, memory_tb_per_s=4.0, memory_gib=96),
    "h100": GpuModel(bf16_tflops=989, memory_tb_per_s=3.35, memory_gib=80),
    "h20": GpuModel(bf16_tflops=148, memory_tb_per_s=4.0, memory_gib=96),
    "h200": GpuModel(bf16_tflops=989, memory_tb_per_s=4.8, memory_gib=141),
    "h800": GpuModel(bf16_tflops=989, memory_tb_per_s=3.35, memory_gib=80),
    "mi250x-gcd": GpuModel(bf16_tflops=192, memory_tb_per_s=1.6, memory_gib=64),
}

DEFAULT_SIMULATED_GPU = "h100"
