"""The facts about hardware, and the needs of models. Pure.

gpus          the catalogue of GPUs
cost_model    time of a turn and cost of a plan
memory_model  memory of engines, trainers, windows and environments
"""
