"""Which engine serves a turn.

router        endpoints, loads, generate
decision      the choice, pure
trajectories  what is known of each trajectory
engines       what is known of each engine
role_switch   engines that change their role
room_queue    turns that wait for KV
factory       the router that a recipe and a model need
"""
