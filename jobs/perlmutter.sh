# shellcheck shell=bash
# Included by batch scripts on Perlmutter, before Python starts.
export MPICH_OFI_NIC_POLICY=GPU
