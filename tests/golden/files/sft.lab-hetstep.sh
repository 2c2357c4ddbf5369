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
#SBATCH --cpus-per-task=4
#SBATCH --partition=prefill
#SBATCH --mem=6G
#SBATCH --gres=gpu:h100:1

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/sft-1 0
