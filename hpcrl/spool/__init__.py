"""The spools: trajectories on disk, durable and optionally compressed.

ids        ids of groups, episodes, attempts and requests
status     how an episode ended, in six words
outcome    how, and for what reason: the table of all outcomes
record     a trajectory and its packed form
episode_lengths  how long episodes are, as counts
token_fates  what became of generated tokens: trained, or why not
routed_experts  the experts that each token was sent to
rows       the conversations of a trajectory, each as the model saw it
segment    one file of trajectories
hdf5       HDF5 written by hand, and read by any h5py
listing    the segments of a directory
list_line  a trajectory as a line of a list
reader     reads what is new
writer     batches, and the disk writer
retention  archives and removes segments that were used
"""
