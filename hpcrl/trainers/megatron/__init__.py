"""The Megatron-core trainer.

trainer        the trainer
model          the model, on GPUs and on CPUs, and its data-parallel copies
kept_pass      what layers need of a micro-batch, for each of its passes
stage_balance  the loss that balances experts, in the layers of a stage
stage_replay   the experts that engines chose, in its routers
layers         the parts of its layers that are not Megatron's, and log-probs from its hidden states
weight_names   shards of Megatron's tensors by Hugging Face names
"""
