"""Every performance claim as a command: `python -m bench.NAME` prints a table, `--json` one object."""
