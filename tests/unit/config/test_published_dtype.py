"""The dtype of the weights that engines are sent, by the recipe and the model's config.json."""

import pytest

from hpcrl.config.published_dtype import choose_published_dtype, read_stored_dtype
from tests.support.plans import make_recipe

VLLM = 'engine.backend="vllm"'


@pytest.mark.parametrize(
    ("settings", "config", "dtype"),
    [
        ((), {"dtype": "bfloat16"}, "float32"),  # the embedded engine computes in float32
        ((VLLM,), {"dtype": "bfloat16"}, "bfloat16"),
        ((VLLM,), {"torch_dtype": "torch.float16"}, "float16"),
        ((VLLM,), {"dtype": "float32"}, "float32"),
        ((VLLM,), {}, "float32"),
        ((VLLM, 'engine.dtype="bfloat16"'), {"dtype": "float32"}, "bfloat16"),
        ((VLLM, 'engine.dtype="float32"'), {"dtype": "bfloat16"}, "float32"),
        ((VLLM, 'train.publish_dtype="float32"'), {"dtype": "bfloat16"}, "float32"),
        (('train.publish_dtype="bfloat16"',), {}, "bfloat16"),
    ],
)
def test_weights_are_published_in_the_dtype_of_the_engines(
    settings: tuple[str, ...], config: dict[str, str], dtype: str
) -> None:
    assert choose_published_dtype(make_recipe(*settings), config) == dtype


@pytest.mark.parametrize("config", [{}, {"dtype": None}, {"dtype": "auto"}, {"torch_dtype": "float8_e4m3fn"}])
def test_a_dtype_that_weights_cannot_have_is_none(config: dict[str, str]) -> None:
    assert read_stored_dtype(config) is None
