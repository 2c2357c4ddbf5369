"""The lab: a real Slurm with simulated nodes on one machine, started in seconds and removed without a trace.

lab      the functions behind `hpcrl lab`: up, down, status, make_environment
start    start the daemons in order and record them
conf     the nodes, and the configuration files made from jobs/lab/
likeness  a lab that imitates a site
daemons  start processes with a token, find them again and end them
outages  a silent controller, nodes that lose power
node_isolation  what the nodes of a strict lab do not share
keeper   the parent of each slurmd, which adopts the orphans of its jobs
"""
