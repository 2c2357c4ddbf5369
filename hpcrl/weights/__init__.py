"""Transfer of new weights from the trainer to every engine while it generates.

layout        where tensors and shards are in a run of bytes
checksum      the checksum of a tensor's bytes
versions      manifests, the newest version, the transport in use
tensor_file   a safetensors file, tensor by tensor
stored_tensors  the names of tensors in the files of a model
model_update  copy or lend tensors to a model
window        shared memory with two versions
stores        versions in files or in the window, and their publication
couriers      transfer between nodes

The modules here import no subfolder; stores and couriers import the window.
"""
