"""Stand-ins for tests of one's own; nothing in hpcrl imports them.

ranks   several ranks of a trainer, each in a process
rank_imports  what they need, imported once
nodes   couriers of several simulated nodes
memory  a spool and a weight store in memory
faulty_disk  a file system that fails on command
event_lines  the events of a campaign as dicts
recipes  a recipe by its name
engines  an engine held between two steps
virtual_time  an event loop with virtual time
fake_steps  passes of the torch trainer on tensors without data
learning  rows and checkpoints
shards  slices of tensors
model_templates  small tokenizers with the chat templates of current families
"""
