#!/bin/bash
#SBATCH --job-name=hpcrl-multitask-1
#SBATCH --time=00:30:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:66fc526b1a1a822f:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --output=/scratch/someone/hpcrl/multitask-1/jobs/000/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --partition=boost_usr_prod
#SBATCH --account=IscrC_x
#SBATCH --mem=240G
#SBATCH --gres=gpu:2

set -eu
umask 077

set +eu
# shellcheck shell=bash
# Included by batch scripts on Leonardo, before Python starts.
# Compute nodes have no internet: models must be in the local cache.
export HF_HUB_OFFLINE=1
set -eu

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/multitask-1 0
