#!/bin/bash

set -eu
umask 077

exec /opt/hpcrl/bin/python -m hpcrl.driver /scratch/someone/hpcrl/quickstart-vllm-1 0
