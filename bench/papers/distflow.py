"""DistFlow's scaling, by arithmetic (`compute_scaling`)."""

from bench.figures import Figure
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S


def compute_scaling() -> list[Figure]:
    """Compute DistFlow's scaling from what moves where.

    Assumed: every rank has 8 samples of 8,192 tokens a step, whose work takes 100 s; a token has 40 bytes in all stages
    (ids, masks, log-probs of three models, advantages, rewards), and multimodal samples 20 MB more; a single controller
    receives and sends all of it between five stages over one 200 Gbit/s port, with 1 GB/s of serialization (the
    published one has run out of memory before); with a controller on each rank, ranks read their own shares, and every
    doubling of ranks adds a collective of 50 ms and 0.5 % of stragglers. No bar: the efficiency follows from these.
    """
    work_s, samples, stages = 100.0, 8, 5
    sample_bytes = 8192 * 40 + 20e6
    figures, many_efficiencies, single = [], {}, {}
    for ranks in (32, 64, 128, 256, 512, 1024):
        doublings = ranks.bit_length() - 1
        many_s = work_s * (1 + 0.005 * doublings) + 0.05 * doublings + samples * sample_bytes / LINK_BYTES_PER_S
        moved = ranks * samples * sample_bytes * stages * 2
        single_s = work_s * (1 + 0.005 * doublings) + moved / LINK_BYTES_PER_S + moved / 1e9
        many_efficiencies[ranks], single[ranks] = work_s / many_s, work_s / single_s
        name = f"DistFlow, {ranks} ranks: one controller / many, time of a step"
        figures.append(Figure(name=name, value=single_s / many_s))
    relative = many_efficiencies[512] / many_efficiencies[32]
    return [
        *figures,
        Figure(name="DistFlow: efficiency at 512 ranks over 32 (published 0.90 to 0.94)", value=relative, unit="share"),
        Figure(name="DistFlow: the same with one controller", value=single[512] / single[32], unit="share"),
    ]
