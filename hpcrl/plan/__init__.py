"""Recipe and site become a plan. Pure.

plan        make_plan
checks      whether a recipe agrees with itself
demand      what a role needs of a node
partitions  the best partition for one role
layout      all roles: hetjob, hetstep, local
sizing      workers where the recipe is silent
components  het groups and sbatch flags of a finished layout
"""
