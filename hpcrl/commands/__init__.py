"""Commands of the login node that no other package owns, each in its module; `hpcrl/cli.py` calls `add_commands`.

arguments    their command lines
trial        `hpcrl try`: a few episodes of each domain
skeleton     `hpcrl init`: a recipe and an environment to start from
event_list   `hpcrl events`
log_files    `hpcrl logs`
removal      `hpcrl rm`
comparison   `hpcrl compare`: two campaigns side by side
topics       `hpcrl help`
examples     the examples of every command
completion   `hpcrl completion`: for bash, zsh and fish
man_page     `hpcrl man`
schemas      `hpcrl schema`: the JSON that commands print
"""
