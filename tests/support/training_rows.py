"""The training rows of all tests.

make_training_row  random tokens, about half of them trained, without credit
"""

import numpy as np

from hpcrl.learn.batch import TrainingRow


def make_training_row(length: int, *, seed: int = 0, vocabulary: int = 32) -> TrainingRow:
    """Make a row; rows of one seed and length are equal."""
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.5
    num = int(mask.sum())
    return TrainingRow(
        inputs=rng.integers(0, vocabulary, length, dtype=np.int32),
        mask=mask,
        targets=rng.integers(0, vocabulary, num, dtype=np.int32),
        behaviour=np.zeros(num, np.float32),
        credit=np.zeros(num, np.float32),
        versions=np.zeros(num, np.int32),
    )
