"""Show the state of a campaign, from its files and Slurm.

collect     read events and files, ask Slurm
progress    fold events into figures
job_state   the state of each job, and the reason
advisories  what is wrong with it, ranked
snapshot    a campaign at one moment
screen      one screen
view        `hpcrl monitor`, `ls` and `--watch`
"""
