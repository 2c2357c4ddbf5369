"""The time in which the ranks of the trainer send each other what a training step needs. Pure.

    estimate_traffic           of a step, by the settings that decide the memory of a rank
    StepTraffic, NO_TRAFFIC    the result
    StepBatch                  the tokens of the step
    RankLinks                  the bandwidth between ranks

This is arithmetic from the figures of the links, which count as used in full and without latencies: no measured steps
of several GPUs were at hand. Left out are what recomputed layers send again, the activations between stages, and models
that the trainer only reads. A log-prob pass before the step and its forward pass send the same, and the backward pass
the gradients of that.
"""

from dataclasses import dataclass
from math import inf

from hpcrl.hardware.architecture import ModelArchitecture, count_kv_repeats
from hpcrl.hardware.megatron_memory import MegatronSetup
from hpcrl.hardware.memory_model import BYTES_FP32
from hpcrl.hardware.train_memory import RankSetup, count_trained_params

NUM_PASSES = 3
"""The passes in which layers send their activations, or the gradients of these: two forward, one backward."""


@dataclass(frozen=True, kw_only=True)
class RankLinks:
    """The bytes that a rank can send in a second, and receive at the same time."""

    ranks_per_node: int
    link: float = inf
    """The rate to the other ranks of its node."""
    port: float = inf
    """The rate to other nodes: its share of the ports of its node."""

    def gather_s(self, num_bytes: float, *, size: int, stride: int = 1) -> float:
        """Return the time in which `size` ranks gather a tensor from all of them, or sum it and divide it again.

        Ranks of a group are `stride` apart. A ring goes through all of them, and the ranks of a node share its ports.
        """
        near = self._count_near(size, stride)
        rate = self.link if near == size else min(self.link if near > 1 else inf, near * self.port)
        return num_bytes * (size - 1) / size / rate

    def swap_s(self, num_bytes: float, *, size: int, stride: int = 1) -> float:
        """Return the time in which each rank sends an equal part of its tensor to each one of its group."""
        near = self._count_near(size, stride)
        return num_bytes / size * max((near - 1) / self.link, (size - near) / self.port)

    def _count_near(self, size: int, stride: int) -> int:
        """Count the ranks of a group that are on one node."""
        return max(1, min(size, self.ranks_per_node // stride))


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The tokens of a training step, in which all ranks have equal parts."""

    num_tokens: float
    num_micro_batches: int
    """The micro-batches of a rank in the whole step."""
    num_updates: int = 1
    """The minibatches, with an optimizer step each."""


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """The seconds of a training step in which ranks send, by what waits for it."""

    within_s: float = 0.0
    """Between the products of layers, which wait for it."""
    beside: tuple[tuple[float, float], ...] = ()
    """Seconds in which products are computed too, each with the number of passes that these are of."""
    after_s: float = 0.0
    """After the last micro-batch."""

    def exposed_s(self, pass_s: float) -> float:
        """Return the seconds of `beside` that are longer than the products, of which a forward pass takes `pass_s`.

        Layers are alike, and each receives its weights, or sends its gradients, while a neighbour computes. So what
        exceeds the products of a layer is exposed, and the sum over layers and micro-batches is that of the step.
        """
        return sum(max(0.0, seconds - num_passes * pass_s) for seconds, num_passes in self.beside)


NO_TRAFFIC = StepTraffic()


def estimate_traffic(
    shape: ModelArchitecture, setup: RankSetup | MegatronSetup, *, batch: StepBatch, links: RankLinks
) -> StepTraffic:
    """Estimate the traffic of a training step."""
    if isinstance(setup, MegatronSetup):
        return _estimate_divided(shape, setup, batch, links)
    if setup.is_sharded:
        return _estimate_sharded(shape, setup, batch, links)
    return _estimate_whole(shape, setup, batch, links)


def _estimate_sharded(shape: ModelArchitecture, setup: RankSetup, batch: StepBatch, links: RankLinks) -> StepTraffic:
    """Count FSDP2's: every pass gathers all weights, and every backward pass divides the sums of their gradients."""
    trained = count_trained_params(shape, setup)
    whole = trained + (0 if setup.trains_all else shape.num_params)
    num, size = batch.num_micro_batches, setup.num_ranks
    gather_s = num * links.gather_s(setup.compute_bytes * whole, size=size)
    scatter_s = num * links.gather_s(BYTES_FP32 * trained, size=size)
    return StepTraffic(
        within_s=_estimate_context_s(shape, setup, batch.num_tokens / size, links),
        beside=((gather_s, 1), (gather_s, 1), (gather_s + scatter_s, 2)),
    )


def _estimate_whole(shape: ModelArchitecture, setup: RankSetup, batch: StepBatch, links: RankLinks) -> StepTraffic:
    """Count DDP's: the last backward pass before an optimizer step sums all gradients, which gather again."""
    sum_s = 2 * links.gather_s(BYTES_FP32 * count_trained_params(shape, setup), size=setup.num_ranks)
    return StepTraffic(
        within_s=_estimate_context_s(shape, setup, batch.num_tokens / setup.num_ranks, links),
        beside=((batch.num_updates * sum_s, 2 * batch.num_updates / batch.num_micro_batches),),
    )


def _estimate_divided(
    shape: ModelArchitecture, setup: MegatronSetup, batch: StepBatch, links: RankLinks
) -> StepTraffic:
    """Count Megatron's: activations of layers, then the sums of gradients and the weights that one copy updates."""
    num_tp, num_pp, num_ep, each = (
        setup.tensor_parallel,
        setup.pipeline_parallel,
        setup.expert_parallel,
        setup.compute_bytes,
    )
    own = batch.num_tokens * num_pp / setup.num_ranks  # the positions that a rank has between layers
    token_bytes = each * shape.hidden_size
    num_divided = 2 * (shape.num_layers + shape.num_dense_layers)  # gathered before attention or MLP, divided after it
    num_divided += 2 * shape.num_expert_layers * (shape.shared_inner > 0)
    tensor_s = num_divided / num_pp * links.gather_s(own * num_tp * token_bytes, size=num_tp)
    tensor_s += batch.num_micro_batches * links.gather_s(each * shape.embedding_params, size=num_tp)  # of the head
    routed_bytes = own * shape.experts_per_token * token_bytes
    expert_s = 2 * shape.num_expert_layers / num_pp * links.swap_s(routed_bytes, size=num_ep)
    others = BYTES_FP32 * (shape.num_params - shape.num_expert_params) / (num_tp * num_pp)
    experts = BYTES_FP32 * shape.num_expert_params / (num_ep * num_pp)
    sum_s = links.gather_s(others, size=setup.num_copies, stride=num_tp)
    sum_s += links.gather_s(experts, size=setup.num_expert_copies, stride=num_ep)
    return StepTraffic(
        within_s=NUM_PASSES * (tensor_s + expert_s) + _estimate_context_s(shape, setup, own, links),
        after_s=2 * batch.num_updates * sum_s,
    )


def _estimate_context_s(
    shape: ModelArchitecture, setup: RankSetup | MegatronSetup, own: float, links: RankLinks
) -> float:
    """Return the time in which ranks swap positions for heads: queries, keys and values, and the output back."""
    num_cp = setup.context_parallel
    num_tp, num_pp = (setup.tensor_parallel, setup.pipeline_parallel) if isinstance(setup, MegatronSetup) else (1, 1)
    num_heads = shape.num_heads // num_tp
    num_kv_heads = num_heads if shape.kv_rank else max(1, shape.num_kv_heads // num_tp)
    num_kv_heads *= count_kv_repeats(num_heads, num_kv_heads, size=num_cp)
    values = (num_heads + num_kv_heads) * (shape.head_dim + shape.value_dim)
    swap_s = links.swap_s(own * num_tp * values * setup.compute_bytes, size=num_cp, stride=num_tp)
    return NUM_PASSES * shape.num_layers / num_pp * swap_s
