"""The settings of `bench.rollout` are those that a plan accepts."""

from bench.rolling.campaign import make_context
from bench.rollout import WHOLE, list_redundancy_cells


def test_each_cell_of_the_redundancy_grid_can_be_planned(tmp_path):
    cells = list_redundancy_cells(WHOLE, (8, 10, 12))
    assert len(cells) == 18
    for number, setting in enumerate(cells.values()):
        directory = tmp_path / str(number)
        directory.mkdir()
        make_context(directory, setting)
