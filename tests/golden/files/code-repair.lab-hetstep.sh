#!/bin/bash
#SBATCH --job-name=hpcrl-code-repair-1
#SBATCH --time=04:00:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:bf052e79e68bc208:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --output=/scratch/someone/hpcrl/code-repair-1/jobs/000/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --partition=h100
#SBATCH --mem=14G
#SBATCH --gres=gpu:h100:1

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/code-repair-1 0
