"""AdamW as a recipe sets it."""

import torch

from hpcrl.config.recipe import TrainConfig
from hpcrl.trainers.optimizer import make_optimizer
from tests.support.live_bytes import LiveBytes


def settings(**changed):
    return TrainConfig(num_steps=1, groups_per_step=1, learning_rate=0.1, **changed)


def test_matrices_decay_and_norms_and_biases_do_not():
    matrix, norm = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    optimizer = make_optimizer([matrix, norm], train=settings(weight_decay=0.5), learning_rate=0.1)
    for parameter in (matrix, norm):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert matrix.tolist() == torch.full((2, 2), 0.95).tolist()
    assert norm.tolist() == [1.0, 1.0]


def test_a_step_holds_nothing_beside_weights_gradients_and_moments():
    weights = [torch.nn.Parameter(torch.ones(256, 256)) for _ in range(3)]
    optimizer = make_optimizer(weights, train=settings(), learning_rate=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with LiveBytes() as live:
        for weight in weights:
            for tensor in (weight, weight.grad, *optimizer.state[weight].values()):
                live.ignore(tensor)
        optimizer.step()
    assert live.peak < weights[0].nbytes / 100


def test_the_first_two_steps_are_those_of_the_formula():
    weight = torch.nn.Parameter(torch.tensor([[1.0]], dtype=torch.float64))
    beta1, beta2, eps, value, first, second = 0.5, 0.8, 1e-3, 1.0, 0.0, 0.0
    optimizer = make_optimizer([weight], train=settings(adam_betas=(beta1, beta2), adam_eps=eps), learning_rate=0.1)
    for step, gradient in enumerate((2.0, -1.0), start=1):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        value -= 0.1 * first / (1 - beta1**step) / ((second / (1 - beta2**step)) ** 0.5 + eps)
        torch.testing.assert_close(weight.item(), value)
