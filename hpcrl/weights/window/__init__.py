"""A node's shared memory with two versions of the weights.

window        write, read, check
file          the mapped file and its checksums
slot_headers  the state of each slot
shm_cleanup   removes shared memory of killed processes
"""
