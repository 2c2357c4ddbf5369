#!/bin/bash
#SBATCH --job-name=hpcrl-quickstart-vllm-1
#SBATCH --time=00:20:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:a9ae767d76af90f5:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --output=/scratch/someone/hpcrl/quickstart-vllm-1/jobs/000/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --partition=h100
#SBATCH --mem=7G
#SBATCH --gres=gpu:h100:1

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/quickstart-vllm-1 0
