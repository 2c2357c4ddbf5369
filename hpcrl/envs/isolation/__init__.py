"""Environments in processes and sandboxes of their own.

process           the parent's end
child             the child's end
wire              what passes between them
sandbox           walls around a process
program_launcher  starts an agent program behind them
"""
