#!/bin/bash
#SBATCH --job-name=hpcrl-questions-1
#SBATCH --time=00:20:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:bb60365295ec607f:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --output=/scratch/someone/hpcrl/questions-1/jobs/000/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --partition=prefill
#SBATCH --mem=15G
#SBATCH --gres=gpu:h100:2

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/questions-1 0
