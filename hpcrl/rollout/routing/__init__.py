"""Routing of turns to engines.

router        endpoints, loads, generate
decision      the choice, pure
trajectories  the state of each trajectory
engines       the state of each engine
role_switch   engines that change their role
room_queue    turns that wait for KV
factory       makes the router for a recipe and a model
"""
