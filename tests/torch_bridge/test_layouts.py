"""Values that lie channels-last: nothing is turned that need not be, and torch's order is what is meant."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.torch_bridge.networks_at_random import AtRandom, Permuted, Tokens, steps
from tests.torch_bridge.oracle import assert_same_gradients
from torch_bridge import convert
from torch_bridge.lowerings import registry
from torch_bridge.tensors import to_jax

ROWS = 7  # no other dim of the networks below has as many elements


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _turned(function: Any, *args: Any) -> int:
    """How many batches of images a function transposes."""
    equations = _equations(jax.make_jaxpr(function)(*args).jaxpr)
    shapes = [e.invars[0].aval.shape for e in equations if e.primitive.name == "transpose"]
    return sum(len(shape) > 2 and shape[0] == ROWS for shape in shapes)


def _turned_both_ways(module: nn.Module, x: torch.Tensor, **options: Any) -> tuple[int, int]:
    """Transposed images of a converted module: forward, and forward with the gradient of everything."""
    converted = convert(module, (x,), **options)

    def loss(params: Any, x: Any) -> Any:
        out = converted.apply(params, converted.buffers, x)[0]
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    args = (converted.params, to_jax(x))
    return _turned(loss, *args), _turned(jax.grad(loss, (0, 1)), *args)


class Chain(nn.Module):
    """What convolutional networks are made of, from an image to an image."""

    def __init__(self, space: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1], f"BatchNorm{space}d"
        back = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[space - 1]
        self.first, self.norm = conv(3, 8, 3, padding=1, bias=False), getattr(nn, norm)(8)
        self.pool = getattr(nn, f"MaxPool{space}d")(2)
        self.second, self.groups = conv(8, 16, 3, padding=1, groups=2), nn.GroupNorm(4, 16)
        self.instance, self.slopes = getattr(nn, f"InstanceNorm{space}d")(16, affine=True), nn.PReLU(16)
        self.scale = nn.Parameter(torch.ones(16, *(1,) * space))
        self.squeeze, self.up = nn.Linear(16, 16), back(16, 8, 2, 2)
        self.last = conv(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.relu(self.norm(self.first(x)))
        deep = F.silu(self.groups(self.second(self.pool(wide)))).float()
        deep = deep + self.slopes(self.instance(deep)) * self.scale
        gate = self.squeeze(deep.flatten(2).mean(2)).sigmoid()
        deep = deep * gate.view(*gate.shape, *(1 for _ in deep.shape[2:])).expand_as(deep)
        deep = torch.cat([self.up(deep), F.interpolate(deep[:, :8], scale_factor=2)], 1)
        deep = torch.cat([part - part.mean(1, keepdim=True) for part in deep.chunk(2, 1)], 1)[:, :8]
        return F.pad(self.last(torch.cat([wide, deep], 1)), (1, -1)).softmax(1)


@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_chain_is_turned_where_images_enter_and_leave(space: int, train: bool) -> None:
    x = torch.randn(ROWS, 3, *(6, 8, 4)[:space])
    forward, both = _turned_both_ways(Chain(space).train(train), x)
    assert forward == 2
    assert both == 4


def test_under_autocast_no_more_is_turned() -> None:
    assert _turned_both_ways(Chain(2), torch.randn(ROWS, 3, 6, 8), precision="bf16") == (2, 4)


class Classifier(nn.Module):
    """From an image to numbers without dims of space: through global pooling, as most do."""

    def __init__(self, pooled: Any) -> None:
        super().__init__()
        self.conv, self.head, self.pooled = nn.Conv2d(3, 8, 3), nn.Linear(8, 2), pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pooled(self.conv(x).relu()))


@pytest.mark.parametrize(
    "pooled",
    [
        lambda x: x.mean((2, 3)),
        lambda x: x.mean((-1, -2), keepdim=True).flatten(1),
        lambda x: F.adaptive_avg_pool2d(x, 1)[:, :, 0, 0],
        lambda x: F.avg_pool2d(x, x.shape[2:]).squeeze(-1).squeeze(-1),
        lambda x: F.adaptive_avg_pool2d(x, 1).view(x.shape[0], -1),
        lambda x: x.flatten(2).logsumexp(2),
        lambda x: x.flatten(2).transpose(1, 2).mean(1),
        lambda x: x.permute(0, 2, 3, 1).sum((1, 2)),
    ],
)
def test_what_is_pooled_is_not_turned_back(pooled: Any) -> None:
    assert _turned_both_ways(Classifier(pooled), torch.randn(ROWS, 3, 6, 5)) == (1, 2)


def test_a_detour_over_the_last_dim_moves_nothing() -> None:
    detour = nn.Sequential(nn.Conv2d(3, 8, 3), Permuted(8, 2), nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1))
    assert _turned_both_ways(detour, torch.randn(ROWS, 3, 6, 5)) == (1, 2)
    tokens = nn.Sequential(nn.Conv2d(3, 8, 3), Tokens(8), nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1))
    assert _turned_both_ways(tokens, torch.randn(ROWS, 3, 6, 5)) == (1, 2)


class Speech(nn.Module):
    """Rows of features, convolved over time and given back as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.conv(self.linear(x).transpose(1, 2))).transpose(1, 2)


def test_rows_convolved_over_time_are_not_turned() -> None:
    assert _turned_both_ways(Speech(), torch.randn(ROWS, 9, 8)) == (0, 0)


def assert_equals_torch(network: nn.Module, x: torch.Tensor, rows: int) -> None:
    """Values, and gradients of everything, at another number of rows than that of the example."""
    converted = convert(network, (x,))
    other = torch.randn(rows, *x.shape[1:]).requires_grad_()
    state = {name: value.clone() for name, value in network.state_dict().items()}
    expected = network(other)
    sum(out.sin().sum() for out in expected).backward()
    network.load_state_dict(state)

    def loss(params: Any, x: Any) -> Any:
        out = converted.apply(params, converted.buffers, x)[0]
        return sum(jnp.sum(jnp.sin(part)) for part in out), out

    args = (converted.params, to_jax(other.detach()))
    (_, out), (of_params, of_x) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*args)
    for got, want in zip(out, expected, strict=True):
        assert got.shape == want.shape
        size = max(1.0, float(want.detach().abs().max()))
        np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), rtol=1e-3, atol=1e-4 * size)
    assert other.grad is not None
    error = np.linalg.norm(np.asarray(of_x) - other.grad.numpy())
    assert error <= 1e-3 * float(other.grad.norm()) + 1e-6
    assert_same_gradients(of_params, network)


# Together they take every step at least once.
@pytest.mark.parametrize("seed", range(9))
def test_networks_at_random_equal_torch(seed: int) -> None:
    names = list(steps(8, (4, 4)))
    space = seed % 3 + 1
    network = AtRandom(seed, space, 5, tuple(names[seed::9]))
    assert_equals_torch(network, network.example(space), rows=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_more_networks_at_random_equal_torch(seed: int) -> None:
    space = seed % 3 + 1
    network = AtRandom(seed, space, 7)
    assert_equals_torch(network, network.example(space), rows=3)


@pytest.mark.slow
@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("name", list(steps(8, (4, 4))))
def test_every_step_equals_torch(name: str, space: int) -> None:
    network = AtRandom(0, space, 1, (name,))
    assert_equals_torch(network, network.example(space), rows=3)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.conv(x)
        return F.dropout(x, 0.5), F.dropout2d(x, 0.5), torch.rand_like(x), F.alpha_dropout(x, 0.1, True)


def test_random_numbers_do_not_depend_on_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = convert(Drops(), (torch.randn(2, 3, 6, 7),))

    def drawn() -> Any:
        args = (converted.params, converted.buffers, jnp.ones((2, 3, 6, 7)))
        return converted.apply(*args, rng=jax.random.key(3))[0]

    last = drawn()
    conv = torch.ops.aten.conv2d.default
    found = registry.find(conv)
    assert found is not None
    monkeypatch.setitem(registry._LOWERINGS, conv, replace(found, in_layout=None))
    for got, want in zip(last, drawn(), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-5)


def test_lowerings_of_users_see_the_order_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def relu(x: Any) -> Any:
        seen.append(x.shape)
        return x * jnp.arange(x.shape[1])[:, None, None]

    mine = registry.Lowering(function=relu, random=registry.never)
    monkeypatch.setitem(registry._LOWERINGS, torch.ops.aten.relu.default, mine)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(2, 3, 6, 7)
    converted = convert(module, (x,))
    got = converted.apply(converted.params, converted.buffers, to_jax(x))[0]
    want = module[2](module[0](x) * torch.arange(8)[:, None, None])
    assert seen[-1] == (2, 8, 4, 5)
    np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), atol=1e-5)


class Inner(nn.Module):
    """Images inside branches, loops, and a gradient that forward takes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mixed = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.max_pool2d(self.conv(x), 2)
        x = torch.cond(x.sum() > 0, lambda y: self.mixed(y).tanh(), lambda y: y * 2, (x,))
        inside = x.detach().requires_grad_()
        energy = self.mixed(inside).square().mean((2, 3))
        (force,) = torch.autograd.grad(energy.sum(), inside, create_graph=True)
        return x + self.mixed(force), F.avg_pool2d(force, 2)


def test_images_inside_branches_and_inner_gradients_equal_torch() -> None:
    torch.manual_seed(0)
    assert_equals_torch(Inner(), torch.randn(2, 3, 8, 8), rows=3)
