"""The Megatron-core trainer.

trainer       the trainer
model         the model, on GPUs and on CPUs
weight_names  names of tensors as Hugging Face has them
"""
