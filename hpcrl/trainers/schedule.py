"""The learning rate of a training step: a warm-up, then constant or falling to the last step."""

import math

from hpcrl.recipe import Train


def learning_rate(step: int, *, train: Train, peak: float) -> float:
    """For the step of this number, from 1 on; a pure function of it, so a resumed campaign goes on where it was."""
    if step < train.warmup_steps:
        return peak * max(step, 1) / train.warmup_steps
    if train.schedule == "constant":
        return peak
    last = min(train.final_learning_rate, peak)
    done = (step - train.warmup_steps) / max(train.num_steps - train.warmup_steps, 1)
    left = 1 - min(done, 1.0)
    if train.schedule == "cosine":
        left = (1 + math.cos(math.pi * (1 - left))) / 2
    return last + (peak - last) * left
