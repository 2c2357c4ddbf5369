"""The lab: a real Slurm with simulated nodes on one machine, brought up and taken down without a trace.

lab      up, down, status, environment: what `hpcrl lab` calls
start    the order of starting, and the record of what was started
conf     the nodes, and the configuration files made from jobs/lab/
daemons  processes that are started with a token, found again and ended
keeper   the parent of each slurmd, which adopts what its jobs leave behind
"""
