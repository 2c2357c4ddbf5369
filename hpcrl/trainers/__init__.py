"""Trainers: torch and Megatron-core behind one protocol.

base              the protocols
step              one step, for any backend
micro_batch_loss  the loss of a micro-batch
step_metrics      the figures of a step
torch             the torch trainer
torch_model       its model, and LoRA
critic            the value model
megatron          the Megatron-core trainer
state             tensors on disk for any parallelism
checkpoint        checkpoints
world             ranks and collectives
leader            rank 0 and the ranks that follow
publishing        weights handed to the weight plane
export            a model directory for others
"""
