#!/bin/bash
#SBATCH --job-name=hpcrl-q-1
#SBATCH --time=00:20:00
#SBATCH --export=ALL
#SBATCH --comment=hpcrl:c9c3ebbcd9f0183c:0
#SBATCH --signal=B:USR2@60
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --output=/scratch/someone/hpcrl/q-1/jobs/000/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=3
#SBATCH --account=m1
#SBATCH --mem=7G

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/q-1 0
