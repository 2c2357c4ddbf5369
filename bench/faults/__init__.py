"""Whole campaigns under faults: where they run, what is seen of them, and the faults themselves.

places     this machine, or a strict lab: what runs there, what was left, what may be broken
watch      a campaign as it is seen from outside, and its invariants
strikes    the faults, chosen at random
report     the faults of many runs in one file, and their figures
slow_episodes   episodes and steps that only take time, for campaigns and for their peers
"""
