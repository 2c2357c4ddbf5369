"""Play a few episodes of each domain of a recipe, without a campaign: `hpcrl try`.

__main__    the process that plays and shows them, run by an interpreter that has torch
player      one engine, one env worker, no trainer
report      what is printed
engine_probe  a vLLM server beside a trainer, which `hpcrl doctor --job` runs on nodes
"""
