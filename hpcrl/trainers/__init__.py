"""Trainers: torch and Megatron-core behind one protocol.

base              the protocols
step              one step, for any backend
nodes             the nodes of the pipeline that every rank runs
memory_error      a rank that runs out of memory during a step
micro_batch_loss  the loss of a micro-batch
step_metrics      the metrics of a step
torch             the torch trainer
torch_model       its model
adapters          LoRA
published_adapters  what engines are sent of them
model_files       model directories, of which each rank reads its slices
token_model       a causal model that returns log-probs
critic            the value model
attention    attention without a matrix of all pairs of tokens
context_group     ranks that divide the positions of their rows
expert_balance    the loss that balances the experts of a layer
expert_replay     the experts that engines chose, in place of the trainer's choice
spread_model      models of nodes whose data-parallel degree is not the trainer's
optimizer         AdamW, as the recipe sets it, or the user's update
megatron          the Megatron-core trainer
state             tensors on disk, for any parallelism
checkpoint        checkpoints
world             ranks and collectives
leader            rank 0 and the ranks that follow its orders
publishing        weights passed to the weight plane
export            a checkpoint as a model directory
"""
