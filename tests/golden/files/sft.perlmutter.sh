#!/bin/bash
#SBATCH --job-name=hpcrl-sft-1
#SBATCH --time=00:20:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:e72c46e6f3964217:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --output=/scratch/someone/hpcrl/sft-1/jobs/000/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=128
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --account=m1234_g
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --network=job_vni,single_node_vni
#SBATCH --gpu-bind=none

set -eu
umask 077

set +eu
# shellcheck shell=bash
# Included by batch scripts on Perlmutter, before Python starts.
export MPICH_OFI_NIC_POLICY=GPU
set -eu

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/sft-1 0
