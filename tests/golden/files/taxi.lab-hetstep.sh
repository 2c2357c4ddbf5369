#!/bin/bash
#SBATCH --job-name=hpcrl-taxi-1
#SBATCH --time=01:00:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:f55f8c78b19f0566:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --output=/scratch/someone/hpcrl/taxi-1/jobs/000/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --partition=prefill
#SBATCH --mem=15G
#SBATCH --gres=gpu:h100:2

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/taxi-1 0
