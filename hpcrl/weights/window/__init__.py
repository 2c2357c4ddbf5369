"""The window of a node: shared memory with two versions of the weights.

window        write, read and check versions
file          the mapped file and its checksums
slot_headers  the state of each slot
shm_cleanup   remove shared memory of killed processes
"""
