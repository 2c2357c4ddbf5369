"""Facts about hardware, and what models need of it. Pure.

gpus          the catalogue of GPUs
cost_model    time of a turn and price of a plan
memory_model  memory of engines, trainers, windows and environments
"""
