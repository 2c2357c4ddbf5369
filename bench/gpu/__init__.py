"""The check of a machine's GPUs: `make gpu-check`, or `python -m bench.gpu`."""
