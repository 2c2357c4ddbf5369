"""Trajectories for people: list, read, count, export and verify what a campaign's spools hold.

    arguments     the command line of `hpcrl traj`; light, so that every mistake is answered on any login node
    __main__      the commands, in an interpreter that has h5py
    history       every trajectory of a campaign, once, while segments come and go
    wanted        which of them: the filters
    listing       `ls`       conversation, show    `show`       tally, stats    `stats`
    rows, export  `export`   twins, verify         `verify`
    text          what may be printed, and how

Everything reads: a campaign that runs meanwhile is not disturbed.
"""
