"""`hpcrl doctor`: compare a site file with the machine it describes, before a job finds out.

result        the record of one check, its print, and verified facts in the user's own site file
login_checks  what the login node and Slurm report
node_checks   what a node reports, of itself
node_job      one short job that runs the checks of nodes on each partition
"""
