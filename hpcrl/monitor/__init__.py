"""The state of a campaign, from its files and Slurm, on a screen.

collect    reads events and files
progress   events become figures
job_state  the state of each job, and why
snapshot   one picture of a campaign
screen     one screen
view       `hpcrl status`, `ls` and `monitor`
"""
