"""The copies of a part of a model: which of them updates a tensor."""

from collections import Counter

import pytest

from tests.support.megatron import skip_without_megatron

SIZES = {"embedding": 900, **{f"layer.{number}": 100 for number in range(30)}, "norm": 1}


@pytest.fixture
def choose_copies():
    """Return the function; its module imports megatron-core, which takes seconds."""
    skip_without_megatron()
    from hpcrl.trainers.megatron.model import choose_copies

    return choose_copies


def test_every_tensor_is_updated_by_one_copy_and_all_have_about_the_same(choose_copies):
    found = choose_copies(SIZES, num=4)
    loads = Counter()
    for name, copy in found.items():
        loads[copy] += SIZES[name]
    assert found.keys() == SIZES.keys()
    assert sorted(loads) == [0, 1, 2, 3]
    assert max(loads.values()) - min(loads.values()) <= 100


def test_the_choice_does_not_depend_on_the_order_of_the_tensors(choose_copies):
    assert choose_copies(SIZES, num=4) == choose_copies(dict(reversed(SIZES.items())), num=4)


def test_a_copy_may_have_no_tensor(choose_copies):
    assert set(choose_copies({"norm": 1}, num=3).values()) == {0}
