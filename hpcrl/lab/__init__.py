"""The lab: a real Slurm with simulated nodes on one machine, brought up and taken down without a trace.

lab.py       up, down, status, environment: what `hpcrl lab` calls
start.py     the order of starting, and the record of who was started
conf.py      which nodes there are, and the configuration files made from jobs/lab/
daemons.py   processes: spawned with a token, found again, ended, nobody else's touched
keeper.py    the parent of each slurmd: takes in what its jobs leave behind
"""
