#!/bin/bash

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.driver /scratch/someone/hpcrl/multitask-1 0
