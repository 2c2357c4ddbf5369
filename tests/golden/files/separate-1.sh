#!/bin/bash
#SBATCH --job-name=hpcrl-q-1
#SBATCH --time=00:20:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:c9c3ebbcd9f0183c:0:1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --output=/scratch/someone/hpcrl/q-1/jobs/000/logs/component-1.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=24
#SBATCH --account=m1
#SBATCH --mem=250G
#SBATCH --gres=gpu:1

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.job.component_holder /scratch/someone/hpcrl/q-1 0 1
