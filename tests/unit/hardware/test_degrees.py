"""The parts of a model that ranks have."""

import pytest

from hpcrl.hardware.degrees import ParallelDegrees, find_part_layers


@pytest.mark.parametrize(
    ("num_layers", "num_parts", "sizes"),
    [(61, 4, [15, 16, 15, 15]), (94, 8, [11, 12, 12, 12, 12, 12, 12, 11]), (5, 4, [1, 2, 1, 1]), (4, 4, [1] * 4)],
)
def test_every_layer_is_in_one_part_and_the_first_part_has_no_more_than_others(
    num_layers: int, num_parts: int, sizes: list[int]
) -> None:
    parts = [find_part_layers(num_layers, num_parts=num_parts, index=index) for index in range(num_parts)]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert [len(part) for part in parts] == sizes


def test_ranks_are_a_multiple_of_both_groups() -> None:
    degrees = ParallelDegrees(tensor=2, pipeline=3, expert=8, context=2)
    assert (degrees.num_together, degrees.num_divided) == (12, 24)
