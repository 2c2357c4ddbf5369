"""The Megatron-core trainer.

trainer       the trainer
model         the model, on GPUs and on CPUs
weight_names  shards of Megatron's tensors by Hugging Face names
"""
