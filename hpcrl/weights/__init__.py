"""Transfer of new weights from the trainer to every engine while it generates.

layout         where tensors and shards are in a run of bytes
checksum       the checksum of a tensor's bytes
versions       manifests, the newest version, the transport in use
publisher      publication by the trainer
store          the protocols, and a source that reads from several
file_store     files on a shared filesystem
window_store   a node's shared memory
sharded_store  a window that several ranks fill together
tensor_file    a safetensors file, tensor by tensor
part_files     parts of several ranks in a directory
model_update   copy or lend tensors to a model
window         shared memory with two versions
couriers       transfer between nodes
"""
