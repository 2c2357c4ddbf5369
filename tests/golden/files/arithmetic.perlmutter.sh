#!/bin/bash
#SBATCH --job-name=hpcrl-arithmetic-1
#SBATCH --time=00:30:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:9cc0402493491662:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --output=/scratch/someone/hpcrl/arithmetic-1/jobs/000/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=128
#SBATCH --constraint=cpu
#SBATCH --qos=regular
#SBATCH --account=m1234
#SBATCH --exclusive
#SBATCH --network=job_vni,single_node_vni
#SBATCH hetjob
#SBATCH --job-name=hpcrl-arithmetic-1
#SBATCH --time=00:30:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:9cc0402493491662:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --account=m1234_g
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --network=job_vni,single_node_vni
#SBATCH --gpu-bind=none
#SBATCH hetjob
#SBATCH --job-name=hpcrl-arithmetic-1
#SBATCH --time=00:30:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:9cc0402493491662:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --constraint=gpu&hbm80g
#SBATCH --qos=regular
#SBATCH --account=m1234_g
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --network=job_vni,single_node_vni
#SBATCH --gpu-bind=none
#SBATCH hetjob
#SBATCH --job-name=hpcrl-arithmetic-1
#SBATCH --time=00:30:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:9cc0402493491662:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --account=m1234_g
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --network=job_vni,single_node_vni
#SBATCH --gpu-bind=none

set -eu
umask 077

# shellcheck shell=bash
# Included by batch scripts on Perlmutter, before Python starts.
export MPICH_OFI_NIC_POLICY=GPU

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/arithmetic-1 0
