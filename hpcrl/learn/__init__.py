"""Learning from trajectories: pure functions, apart from user nodes.

advantage    advantages of a group
batch        trajectories as training rows
rewards      rewards as training sees them
loss         policy losses
pipeline     nodes that a user's recipe adds
evaluations  the results of evaluations on disk
distribute   a step divided over ranks
consumed     the trajectories that were trained on
"""
