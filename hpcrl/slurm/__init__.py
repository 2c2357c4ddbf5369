"""The commands of Slurm.

commands    runs them
script      the batch script of a job
submit      submits it
allocation  nodes and times of this allocation
status      states and reasons in plain words
"""
