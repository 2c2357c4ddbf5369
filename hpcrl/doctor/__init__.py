"""`hpcrl doctor`: compare a site file with the machine it describes, before a job finds out.

result        the record of one check, its print, and verified facts in the user's own site file
login_checks  what the login node and Slurm report
file_checks   the campaigns' file system, seen from both
node_checks   what a node reports, of itself
node_meeting  what nodes do together: connections to each other, and the SIGTERM at the end
node_job      one short job on each partition, which runs both
"""
