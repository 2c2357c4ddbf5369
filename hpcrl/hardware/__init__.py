"""The facts about hardware, and the needs of models. Pure.

gpus          the catalogue of GPUs
degrees       the ranks that divide a copy of a model, by what they divide
architecture  the sizes of a model, and its weights by kind
model_catalogue  the sizes of common models
cost_model    time of a turn and cost of a plan
rank_traffic  time in which ranks of the trainer send each other what a step needs
speed_fit     fit of the cost model to measurements
loop_model    calls that the event loop of an env worker bears
memory_model     memory of engines, windows, environments
train_memory     memory of a rank of trainer "torch", by its parts, and of its node
megatron_memory  memory of a rank of trainer "megatron"
"""
