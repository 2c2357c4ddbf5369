"""New weights, from the trainer to every engine while it generates.

layout         tensors and shards in bytes
checksum       the checksum of a tensor's bytes
versions       manifests, the newest version, the transport in use
publisher      the trainer's end
store          the protocols, and the newest of several stores
file_store     files on a shared filesystem
window_store   a node's shared memory
sharded_store  ranks that fill a window together
tensor_file    a safetensors file, tensor by tensor
part_files     parts of several ranks in a directory
model_update   tensors into a model
window         shared memory with two versions
couriers       transfer between nodes
"""
