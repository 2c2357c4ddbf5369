"""The commands of the login node; `hpcrl/cli.py` runs them.

arguments    the command lines of all, with the function that each runs
examples     the examples of every command
planning     `hpcrl plan`, `submit`, `stage` and `image`
monitoring   `hpcrl ls` and `monitor`, and what follows a campaign to its end
campaign_logs  `hpcrl logs` and `events`
campaigns    `hpcrl stop`, `resume` and `extend`
removal      `hpcrl rm` and `gc`
calibration  `hpcrl calibrate`: the cost model fitted to measurements
comparison   `hpcrl compare`: two campaigns side by side
interpreters  `hpcrl traj`, `report`, `export` and `simulate`, which another interpreter runs
sites        `hpcrl site` and `doctor`
recipes      `hpcrl recipe`: list, show and write recipes
lab          `hpcrl lab`
trial        `hpcrl try`: a few episodes of each domain
skeleton     `hpcrl init`: a recipe and an environment to start from
topics       `hpcrl help` and `hpcrl man`
completion   `hpcrl completion`: for bash, zsh and fish
schemas      `hpcrl schema`: the JSON that commands print
"""
