#!/bin/bash

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.job.driver /scratch/someone/hpcrl/sft-1 0
