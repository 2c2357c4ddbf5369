"""The commands of `hpcrl traj`: list, show, count, export and verify the trajectories of a campaign.

arguments     the command line, light enough for a login node
__main__      the commands, in an interpreter that has h5py
history       every trajectory of a campaign, each once
listing       `ls`
conversation  turns as text
show          `show`
stats         `stats`
export        `export`
parquet       its Parquet form
inspect_log   its form for inspect-ai's viewer
verify        `verify`
imitation     the data of another campaign's warm-up
"""
