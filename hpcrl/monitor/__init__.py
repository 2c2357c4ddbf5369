"""Show the state of a campaign, from its files and Slurm.

collect     read events and files, ask Slurm
count_lines    the lines of counts that are left out
progress    fold events into figures
job_state   the state of each job, and the reason
notes       lines for a person, one for each cause
advisories  what is wrong with it, ranked
snapshot    a campaign at one moment
screen      one screen
keys        the keys of its terminal
pages, screen_parts    the pages that keys choose, and parts that take the place there is
workers     the workers of a role
log_tail    the ends of logs
view        `hpcrl monitor`, `ls` and `--watch`
"""
