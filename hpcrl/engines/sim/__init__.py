"""The simulated engine: a cost model takes the place of a GPU.

engine  the engine
batch   continuous batching, step by step
"""
