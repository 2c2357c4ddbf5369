"""The embedded engine: a torch model in this process.

engine    the engine
batch     the requests that run together
kv_slots  the KV of running requests
kv_cache  KV that is kept between turns
grammar   the tokens that the structure of an answer allows
expert_recorder  the experts that the model sends tokens to
sampling  sample the next token of every request
"""
