"""What is learned from trajectories: pure but for user nodes.

advantage    advantages of a group
batch        trajectories as training rows
loss         policy losses
pipeline     nodes that a user's recipe adds
evaluations  results of evaluations on disk
distribute   a step divided over ranks
consumed     which trajectories were trained
"""
