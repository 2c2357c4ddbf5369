"""Environments. These modules are public: recipes name their classes.

base            the protocol of an environment, and adapters to it
task_set        the rows of a domain's task set, on disk
pool            environments that are prepared before they are needed
process         an environment in a child process
process_child   the child process
process_wire    the messages between them
isolation       sandboxes of environments and agent programs
check           check the user code of a recipe before it is submitted
random_state    separate random generators for an environment
agent           an agent program as an environment
program_options  the options of an agent program
program_files   what the command of an agent program needs and does not find
arithmetic      sums
question        one question a row
repair          fix a Python function with a tool
software        the judge of tasks in SWE-bench's form
judge           a reward from a language model
judge_access    how user code calls the judges of its campaign
gymnasium_text  FrozenLake, Taxi and Blackjack as text
gymnasium_env   any environment of Gymnasium, by its id
gem             GEM
openenv         OpenEnv
reasoning_gym   Reasoning Gym
textarena       TextArena
verifiers       verifiers, played in separate processes
verifiers_server  a process that plays verifiers' environments
examples        environments to copy from
"""
