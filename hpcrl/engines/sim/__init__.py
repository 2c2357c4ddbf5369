"""The simulated engine: the cost model in place of a GPU.

engine  the engine
batch   continuous batching, step by step
clock   an event loop with virtual time
"""
