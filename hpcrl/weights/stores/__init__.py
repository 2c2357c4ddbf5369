"""The stores of weight versions, and their publication.

store          the protocols, and a source that reads from several
file_store     files on a shared filesystem
window_store   a node's shared memory
pinned_slots   the part of it that a GPU writes
sharded_store  a window that several ranks fill together
part_files     parts of several ranks in a directory
background     a thread for work that training does not wait for
publisher      publication by the trainer
"""
