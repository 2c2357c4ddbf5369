"""Environments. Public: recipes name these classes.

base            the protocol of an environment, and adapters to it
pool            environments that run at once
check           tries an environment before a campaign is submitted
random_state    random generators that a seed decides
isolation       environments in processes and sandboxes of their own
agent           an agent program as an environment
arithmetic      sums
repair          mend a Python function with a tool
judge           a model as the judge
gymnasium_text  FrozenLake as text
gem             GEM
openenv         OpenEnv
reasoning_gym   Reasoning Gym
textarena       TextArena
verifiers       verifiers
examples        environments to copy from
"""
