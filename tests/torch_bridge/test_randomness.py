"""Random operators of a converted module: keys, independence, distribution."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from torch_bridge import convert

ROWS, WIDTH = 64, 400


def _gumbel(x: Any) -> Any:
    return F.gumbel_softmax(x.new_zeros(x.shape[0], 4), tau=1.0, hard=True)


# name -> (function of ones [rows, width], mean, variance)
DRAWS: dict[str, tuple[Any, float, float]] = {
    "rand": (lambda x: torch.rand(x.shape), 0.5, 1 / 12),
    "rand_like": (torch.rand_like, 0.5, 1 / 12),
    "randn": (lambda x: torch.randn(x.shape), 0.0, 1.0),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "randint": (lambda x: torch.randint(2, 8, x.shape).float(), 4.5, 35 / 12),
    "randint_like": (lambda x: torch.randint_like(x, 6), 2.5, 35 / 12),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.3), 0.3, 0.21),
    "normal": (lambda x: torch.normal(x * 2, 3.0), 2.0, 9.0),
    "normal_": (lambda x: x.clone().normal_(1.0, 2.0), 1.0, 4.0),
    "uniform_": (lambda x: x.clone().uniform_(-1, 3), 1.0, 16 / 12),
    "exponential_": (lambda x: x.clone().exponential_(2.0), 0.5, 0.25),
    "geometric_": (lambda x: x.clone().geometric_(0.5), 2.0, 2.0),
    "log_normal_": (lambda x: x.clone().log_normal_(0.0, 0.25), 1.0317, 0.0687),
    "dropout": (lambda x: F.dropout(x, 0.25), 1.0, 1 / 3),
    "alpha_dropout": (lambda x: F.alpha_dropout(x * 0, 0.25, training=True), 0.0, 0.4359),
    "dropout1d": (lambda x: F.dropout1d(x[:, :, None].expand(-1, -1, 2), 0.5), 1.0, 1.0),
    "rrelu": (lambda x: F.rrelu(-x, 0.1, 0.3, training=True), -0.2, 0.04 / 12),
    "multinomial": (lambda x: torch.multinomial(x[:, :4], 3000, replacement=True).float(), 1.5, 1.25),
    "gumbel": (_gumbel, 0.25, 0.1875),
    "poisson-free noise": (lambda x: x + 0.1 * torch.randn_like(x), 1.0, 0.01),
}


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: draw(x) for name, (draw, _, _) in DRAWS.items()}


def test_every_random_operator_has_its_distribution_and_follows_the_key() -> None:
    converted = convert(Draws(), (torch.ones(4, WIDTH),))
    assert converted.one_export
    run = jax.jit(lambda key: converted.apply({}, {}, jnp.ones((ROWS, WIDTH)), rng=key)[0])
    drawn, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    for name, (_, mean, variance) in DRAWS.items():
        values = np.asarray(drawn[name], np.float64)
        error = 6 * np.sqrt(variance / values.size) + (0.12 if name == "gumbel" else 0)
        assert abs(values.mean() - mean) < error, name
        assert abs(values.var() - variance) < 0.08 * variance + (0.03 if name == "gumbel" else 0), name
        np.testing.assert_array_equal(drawn[name], again[name], err_msg=name)
        assert not np.array_equal(drawn[name], other[name]), name


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.tanh(self.a(x)), 0.5)
        return F.dropout(torch.tanh(self.b(x)), 0.5).square().sum()


def test_a_gradient_recomputed_under_remat_draws_the_same_numbers() -> None:
    converted = convert(Chain(), (torch.randn(4, 8),))

    def loss(params: Any) -> Any:
        return converted.loss_fn(params, converted.batch, rng=jax.random.key(3))

    plain = jax.jit(jax.grad(loss))(converted.params)
    remat = jax.jit(jax.grad(jax.checkpoint(loss)))(converted.params)
    for name, value in plain.items():
        np.testing.assert_allclose(remat[name], value, rtol=1e-5, err_msg=name)


def test_a_permutation_is_one() -> None:
    class Shuffles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[torch.randperm(7)]

    converted = convert(Shuffles(), (torch.arange(7.0),), batch_dims=(None,))
    drawn = [
        np.asarray(converted.apply({}, {}, jnp.arange(7.0), rng=jax.random.key(i))[0]).tolist()
        for i in range(3)
    ]
    assert all(sorted(order) == list(range(7)) for order in drawn)
    assert len({tuple(order) for order in drawn}) == 3
