# shellcheck shell=bash
# Included by batch scripts on Leonardo, before Python starts.
# Compute nodes have no internet: models must be in the local cache.
export HF_HUB_OFFLINE=1
