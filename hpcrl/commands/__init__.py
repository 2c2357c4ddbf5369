"""Commands of the login node that no other package owns, each in its module; `hpcrl/cli.py` calls `add_commands`.

arguments    their command lines
trial        `hpcrl try`: a few episodes of each domain
skeleton     `hpcrl init`: a recipe and an environment to start from
campaign_logs  `hpcrl logs` and `hpcrl events`
removal      `hpcrl rm`
comparison   `hpcrl compare`: two campaigns side by side
topics       `hpcrl help` and `hpcrl man`
examples     the examples of every command
completion   `hpcrl completion`: for bash, zsh and fish
schemas      `hpcrl schema`: the JSON that commands print
"""
