"""Trajectories for people: list, read, count, export and verify what a campaign's spools hold.

arguments     the command line, light enough for a login node
__main__      the commands, in an interpreter that has h5py
history       every trajectory of a campaign, once
listing       `ls`
conversation  turns as text
show          `show`
stats         `stats`
export        `export`
parquet       its Parquet form
verify        `verify`
"""
