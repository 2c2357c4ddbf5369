"""Learning from trajectories: pure functions, apart from user nodes.

advantage    advantages of a group
batch        trajectories as training rows
group_choice  the groups that a step trains on
rewards      rewards as training sees them
loss         policy losses
token_head   log-probs from hidden states, by chunks of tokens
pipeline     the nodes of the learning pipeline, run in their order
user_loss    a loss that a recipe brings
evaluations  the results of evaluations on disk
distribute   a step divided over ranks
consumed     the trajectories that were trained on
"""
