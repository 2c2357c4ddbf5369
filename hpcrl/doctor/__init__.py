"""`hpcrl doctor`: compare a site file with the machine it describes, before a job finds out.

result        the record of one check
login_checks  what the login node and Slurm report
node_checks   what a node reports, of itself
node_job      one short job that runs the checks of nodes on each partition
facts         write what was verified into the user's own site file
report        print results
"""
