"""autograd.Functions that nobody gave a JAX function for: their own backward, with torch as the oracle.

Nearly every backward here differs from the derivative of its forward on purpose: a conversion that only
follows forward fails.
"""

import contextlib
import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import rannc_jax
from tests.torch_bridge.oracle import assert_same_functions, assert_same_gradients, loss_and_gradients
from torch_bridge import BridgeError, JaxModule, convert
from torch_bridge.custom_gradient import custom_gradient

Function = torch.autograd.Function


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Reversal(Function):
    """Returns its input itself, which torch makes a view of."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return -ctx.factor * grad, None


class ClippedGradient(Function):
    """New style; keywords and defaults."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, low: float = -0.5, high: float = 0.5) -> Any:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.low, ctx.high = inputs

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.clamp(ctx.low, ctx.high), None, None


class Swish(Function):
    """Keeps its input only; backward computes the sigmoid again."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return 2 * grad * sigmoid * (1 + x * (1 - sigmoid))


class Scale(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Linear(Function):
    """Parameters as arguments, needs_input_grad, things of all kinds on ctx, an optional argument."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, scale: Scale, notes: dict[str, Any]) -> Any:
        ctx.kept = [x, {"weight": weight}]
        ctx.scale, ctx.notes, ctx.has_bias = scale, notes, bias is not None
        y = x @ weight.t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.kept[0], ctx.kept[1]["weight"]
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = grad @ weight * ctx.scale.value
        if ctx.needs_input_grad[1]:
            to_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) * ctx.notes["factor"]
        if ctx.has_bias and ctx.needs_input_grad[2]:
            to_bias = grad.flatten(0, -2).sum(0)
        return to_x, to_weight, to_bias, None, None


class SeveralOutputs(Function):
    """Integers, a value marked as without gradient, None among the outputs; absent gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, x: Any, index: Any) -> Any:
        values, order = x.sort(-1)
        norm = x.norm()
        ctx.mark_non_differentiable(norm, order)
        ctx.save_for_backward(order)
        return values, order, norm, None, x[index] * 2

    @staticmethod
    def backward(ctx: Any, grad: Any, order: Any, norm: Any, none: Any, picked: Any) -> Any:
        assert none is None
        (places,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter_add_(-1, places, 3 * grad) + norm + picked.sum(0), None


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        length = x.norm()
        ctx.mark_non_differentiable(length)
        return x * 2, length

    @staticmethod
    def backward(ctx: Any, grad: Any, length: Any) -> Any:
        return None if length is not None else grad * 5


class KeepsOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.exp(-x.square())
        ctx.save_for_backward(x, y, None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        x, y, none = ctx.saved_tensors
        assert none is None
        return -x * y * grad


class Nested(Function):
    """Calls Functions in forward (which have no gradient there) and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return Swish.apply(StraightThrough.apply(x * 3)) + x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return Reversal.apply(grad, 2.0) * Swish.apply(x)


class Recomputes(Function):
    """A checkpoint by hand: backward runs the forward again and differentiates it."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(x @ w) * Swish.apply(x)
        return torch.autograd.grad(y, (x, w), grad)


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        ctx.positive = x > 0
        return x.mul_(2).clamp_(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return torch.where(ctx.positive, grad * 7, grad)


class Broadcast(Function):
    """Gradients of another shape and dtype than their inputs, and one too many."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        return x * w.sum(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (grad * 3).half(), grad.sum() + grad.new_zeros(2, 3, 3), None


class ByVjp(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return [x * 2], x * 3  # a list is passed on as it is, without gradient

    @staticmethod
    def vjp(ctx: Any, _: Any, grad: Any) -> Any:
        return grad * 11


class Boxed(Function):
    """Takes its gradients in a list (since torch 2.13), to let go of each when it is done with it."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, second = grads[0] if hasattr(Function, "boxed_grads_call") else grads
        return first * 5 - second


class ChangesGradient(Function):
    """Writes into what forward kept, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.gradient = torch.softmax(x, -1) - 0.25
        return x.logsumexp(-1).sum()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.gradient.mul_(grad)


def written_in_place(x: Any, w: Any) -> Any:
    y = x @ w
    z = InPlace.apply(y)
    return y + z, y is z


def written_in_a_view(x: Any, w: Any) -> Any:
    y = x @ w
    InPlace.apply(y[1:])
    return y * w[0]


def over_parameters_of_a_closure(x: Any, w: Any) -> Any:
    class Closes(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * (w * 2).sum()

    return Closes.apply(x), Closes.apply(x[:2])


def in_regions(x: Any, w: Any) -> Any:
    with torch.no_grad():
        frozen = Swish.apply(x)
    return frozen * x, Swish.apply(x.detach()) * w[0], Swish.apply(frozen) * x


def in_a_loop(x: Any, w: Any) -> Any:
    for step in range(3):
        x = StraightThrough.apply(Swish.apply(x) @ w) * (step + 1)
    return x


def checkpointed(x: Any, w: Any) -> Any:
    def block(x: Any) -> Any:
        return Swish.apply(x) @ w

    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def chosen(x: Any, w: Any) -> Any:
    return torch.cond(x.square().sum() > 0, lambda x: Swish.apply(x) @ w, lambda x: x * 1.0, (x,))


def mapped(x: Any, w: Any) -> Any:
    return torch.vmap(lambda row: ClippedGradient.apply(row * 3) @ w)(x)


def mapped_with_a_shared_argument(x: Any, w: Any) -> Any:
    return torch.vmap(lambda row: Shared.apply(row, w))(x)


class Shared(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, w: Any) -> Any:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        return 2 * w @ grad, 3 * torch.outer(x, grad)


def _takes_keywords() -> bool:
    """Whether this torch's Function.apply does."""
    with contextlib.suppress(TypeError):
        return ClippedGradient.apply(torch.ones(1), high=0.3) is not None
    return False


HIGH = {"high": 0.3} if _takes_keywords() else {}


def linear_with_a_bias(x: Any, w: Any) -> Any:
    return Linear.apply(x, w, w[0], Scale.TWO, {"factor": 4.0})


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "straight through": lambda x, w: StraightThrough.apply(x @ w * 3),
    "reversal": lambda x, w: Reversal.apply(x @ w, 0.25) * w[0],
    "clipped gradient": lambda x, w: ClippedGradient.apply(x @ w, **HIGH),
    "memory saving": lambda x, w: Swish.apply(Swish.apply(x @ w) @ w),
    "linear": linear_with_a_bias,
    "linear without bias": lambda x, w: Linear.apply(x, w, None, Scale.ONE, {"factor": 0.5}),
    "several outputs": lambda x, w: [
        y for y in SeveralOutputs.apply(x @ w, torch.tensor([1, 0, 1])) if y is not None
    ],
    "unmaterialized": lambda x, w: Unmaterialized.apply(x @ w),
    "keeps its output": lambda x, w: KeepsOutput.apply(x @ w),
    "nested": lambda x, w: Nested.apply(x @ w),
    "recomputes": lambda x, w: Recomputes.apply(x, w),
    "broadcast": lambda x, w: Broadcast.apply(x, w),
    "by vjp": lambda x, w: ByVjp.apply(x @ w),
    "boxed": lambda x, w: Boxed.apply(x @ w),
    "changes what it kept": lambda x, w: ChangesGradient.apply(x @ w) * w[0],
    "in place": lambda x, w: written_in_place(x, w)[0],
    "in place, in a view": written_in_a_view,
    "closure": over_parameters_of_a_closure,
    "regions": in_regions,
    "loop": in_a_loop,
    "checkpoint": checkpointed,
    "cond": chosen,
    "vmap": mapped,
    "vmap, shared": mapped_with_a_shared_argument,
    "adds to its gradient": lambda x, w: Counted.apply(x @ w, 4),
}


@pytest.fixture(scope="module")
def same_functions() -> JaxModule:
    torch.manual_seed(0)
    return assert_same_functions(FUNCTIONS, (torch.randn(4, 3), torch.randn(3, 3)))


def test_values_and_gradients_are_torchs(same_functions: JaxModule) -> None:
    assert same_functions.programs.reason == "no tensor has a batch dim"


def test_backwards_that_are_not_linear_ask_for_the_whole_batch(same_functions: JaxModule) -> None:
    nodes = [n for n in same_functions.programs.first.graph.nodes if n.operator is custom_gradient()]
    marked = [n.args[-1].rpartition(".")[2] for n in nodes if n.path.endswith("rannc_coupled")]
    assert marked == ["ClippedGradient", "ClippedGradient", "Counted"]
    assert len(nodes) > 20


def test_a_clipped_gradient_is_not_split_into_microbatches() -> None:
    converted = convert(Applies(lambda x: ClippedGradient.apply(x).square().mean()), (torch.randn(4, 3),))
    step = rannc_jax.auto_partition(converted, optimizer=optax.sgd(0.1), num_stages=1, num_microbatches=2)
    with pytest.raises(rannc_jax.TraceError, match=r"custom_vjp_call in rannc_coupled"):
        step.init()


class Net(nn.Module):
    """Functions over parameters, buffers and rows, whose number some of them are told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Linear.apply(x, self.first.weight, self.first.bias, Scale.TWO, {"factor": 0.5})
        x = Tracked.apply(Swish.apply(x), self.mean, 0.1, x.shape[0])
        self.steps += 1
        x = StraightThrough.apply(Reversal.apply(self.second(x), 0.3) * 4)
        return (x * Linear.apply(x, self.second.weight, None, Scale.ONE, {"factor": 2.0})).mean()


class Tracked(Function):
    """Keeps a running mean, as a normalisation of one's own does, and knows the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Any, mean: Any, share: float, rows: int) -> Any:
        ctx.rows, ctx.shape = rows, x.shape
        mean.mul_(1 - share).add_(x.mean(0) * share)
        ctx.save_for_backward(mean)
        return x - mean

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (mean,) = ctx.saved_tensors
        spread = grad.sum(0, keepdim=True).expand(ctx.shape) / ctx.rows
        return grad - spread.reshape(ctx.rows, -1) * mean, None, None, None


@pytest.fixture(scope="module")
def net() -> tuple[Net, JaxModule]:
    torch.manual_seed(0)
    module = Net()
    return module, convert(module, (torch.randn(2, 4),))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_gradients_of_parameters_and_buffers_are_torchs_at_every_batch_size(net: Any, rows: int) -> None:
    module, converted = net
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x = torch.randn(rows, 4)
    loss, gradients, state = loss_and_gradients(
        converted, (jnp.asarray(x.numpy()),), model_state=converted.model_state
    )
    module.zero_grad()
    wanted = module(x)
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.detach(), rtol=1e-5)
    assert_same_gradients(gradients, module)
    np.testing.assert_allclose(state["mean"], module.mean, rtol=1e-5)
    assert int(state["steps"]) == int(module.steps)
    module.load_state_dict(buffers, strict=False)


def test_one_program_serves_every_batch_size(net: Any) -> None:
    assert net[1].programs.reason is None
    assert net[1].programs.dynamic_reason is None


class Applies(nn.Module):
    """Calls a function of a linear layer's result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def compared(module: nn.Module, x: torch.Tensor, **options: Any) -> JaxModule:
    """Convert, and see that value and gradients are torch's."""
    converted = convert(module, (x,), **options)
    loss, gradients, _ = loss_and_gradients(converted, (jnp.asarray(x.numpy()),))
    wanted = module(x)
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.detach(), rtol=1e-5)
    assert_same_gradients(gradients, module)
    return converted


class Tower(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Swish.apply(self.inner(x))
        for _ in range(3):
            y = ClippedGradient.apply(y.tanh() + x.sin())
        return x + Recomputes.apply(y, self.outer.weight) + self.outer.bias


def test_repeated_blocks_are_stamped_with_their_functions() -> None:
    converted = compared(Tower(3), torch.randn(3, 4))
    assert converted.programs.first.num_copies == 2


def test_where_sizes_are_symbols_the_backward_has_them_too() -> None:
    def pairs(x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.shape[0] * (x.shape[0] - 1) // 2) % x.shape[0]
        return Counted.apply(x[index], x.shape[0]).square().sum()

    module = Applies(pairs)
    converted = convert(module, (torch.randn(4, 3),))
    assert converted.programs.dynamic_reason is not None
    for rows in (3, 8):
        x = torch.randn(rows, 3)
        _, gradients, _ = loss_and_gradients(converted, (jnp.asarray(x.numpy()),))
        module.zero_grad()
        module(x).backward()
        assert_same_gradients(gradients, module)


class Counted(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, rows: int) -> Any:
        ctx.rows = rows
        return x / rows

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        spread = torch.arange(grad.shape[0], dtype=grad.dtype)[:, None]
        return grad * torch.ones(ctx.rows).sum() + spread, None


class Noisy(Function):
    """Draws in forward, uses that in backward, and draws again there."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mask = torch.rand_like(x) < 0.5
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return torch.where(ctx.mask, grad, torch.rand_like(grad) + 2)


def test_random_numbers_of_forward_and_backward() -> None:
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Noisy.apply(x)

    converted = convert(Draws(), (torch.ones(2, 500),))
    x, key = jnp.ones((2, 500)), jax.random.key(0)
    value, pull = jax.vjp(lambda x: converted.apply({}, {}, x, rng=key)[0], x)
    (gradient,) = pull(jnp.ones_like(x))
    kept = np.asarray(value) == 1
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_array_equal(np.asarray(gradient) == 1, kept)
    drawn = np.asarray(gradient)[~kept]
    assert 2 <= drawn.min() < 2.1 < 2.9 < drawn.max() <= 3


def test_only_what_backward_reads_is_kept() -> None:
    converted = convert(Applies(lambda x: Swish.apply(Swish.apply(x)).sum()), (torch.randn(4, 3),))
    _, pull = jax.vjp(lambda p: converted.loss_fn(p, converted.batch), converted.params)
    sizes = [leaf.shape for leaf in jax.tree.leaves(pull) if np.shape(leaf) == (4, 3)]
    assert len(sizes) == 3  # the batch, and the input of each Swish: no sigmoid


def test_gradients_taken_inside_forward_see_the_users_backward() -> None:
    def penalty(x: torch.Tensor) -> torch.Tensor:
        y = KeepsInput.apply(x) * x
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().sum() + y.sum()

    compared(Applies(penalty), torch.randn(4, 3))


class KeepsInput(Function):
    """Its backward can be differentiated: through its input and output, not through what lies between."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        between, y = x.cos(), x.sin()
        ctx.save_for_backward(x, between, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, between, y = ctx.saved_tensors
        return grad * (x * 2 + between + y * 3)


def test_a_backward_that_is_marked_once_is_not_differentiated() -> None:
    def penalty(x: torch.Tensor) -> torch.Tensor:
        y = KeepsOutput.apply(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().sum()

    converted = convert(Applies(penalty), (torch.randn(4, 3),))
    assert np.isfinite(float(converted.loss_fn(converted.params, converted.batch)))
    with pytest.raises(BridgeError, match=r"KeepsOutput is differentiated, and is marked @once_diff"):
        loss_and_gradients(converted, converted.batch)


class Half(Function):
    """By the recipe for automatic mixed precision; notes the dtypes that it computes in."""

    seen: dict[str, torch.dtype] = {}  # noqa: RUF012

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        Half.seen["forward"] = (x @ w).dtype
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        Half.seen["backward"] = (grad.float() @ w.t()).dtype
        return grad @ w.t(), 2 * x.t() @ grad


class Wide(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        Half.seen["wide"] = (x @ w).dtype
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), 3 * x.t() @ grad


class Plain(Function):
    """Without the recipe: backward runs outside the autocast region."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        Half.seen["plain"] = (grad.float() @ w.t()).dtype
        return grad.float() @ w.t(), x.float().t() @ grad.float()


class Mixed(nn.Module):
    def __init__(self, region: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3, 3)) for _ in range(3))
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.weights
        region = torch.autocast("cuda", dtype=torch.bfloat16) if self.region else contextlib.nullcontext()
        with region:
            y = Plain.apply(Wide.apply(Half.apply(x, a), b), c)
        return y.float().mean()


@pytest.mark.parametrize("region", [False, True])
def test_autocast_as_on_a_gpu(region: bool) -> None:
    module = Mixed(region)
    x = torch.randn(5, 3)
    converted = convert(module, (x,), precision=None if region else "bf16")
    _, gradients, _ = loss_and_gradients(converted, (jnp.asarray(x.numpy()),))
    if not region:
        narrow, wide = torch.bfloat16, torch.float32
        assert Half.seen == {"forward": narrow, "backward": narrow, "wide": wide, "plain": wide}
    a, b, c = (w.detach() for w in module.weights)
    grad = torch.full((5, 3), 1 / 15)
    to_c = (x @ a @ b).t() @ grad
    to_b = 3 * (x @ a).t() @ (grad @ c.t())
    to_a = 2 * x.t() @ (grad @ c.t() @ b.t())
    for i, wanted in enumerate((to_a, to_b, to_c)):
        got = np.asarray(gradients[f"weights.{i}"])
        assert np.linalg.norm(got - wanted.numpy()) < 0.02 * np.linalg.norm(wanted)
        assert np.linalg.norm(got - wanted.numpy()) > 1e-5 * np.linalg.norm(wanted)  # half precision it is


class OnlyForward(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2


class AsksForLess(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.needs_input_grad[1]:
            raise NotImplementedError("the gradient of scale")
        return grad * ctx.saved_tensors[0] * 3, None


def test_a_gradient_that_does_not_exist_is_refused_where_it_is_asked_for() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return AsksForLess.apply(self.linear(x), scale).sum() + OnlyForward.apply(x).sum()

    x = torch.randn(2, 3)
    converted = convert(Calls(), (x, torch.randn(2, 3)))
    _, gradients, _ = loss_and_gradients(converted, converted.batch)
    scale = np.asarray(converted.batch[1])
    np.testing.assert_allclose(gradients["linear.bias"], 3 * scale.sum(0), rtol=1e-5)
    for wanted, name in ((1, "AsksForLess"), (0, "OnlyForward")):
        with pytest.raises(BridgeError, match=rf"backward of \S*{name} gives no gradient"):
            jax.grad(lambda *args: converted.apply(converted.params, {}, *args)[0], wanted)(*converted.batch)


class Branches(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2 if grad.sum() > 0 else grad


class TooFew(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Accumulates(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, total: Any) -> Any:
        ctx.total = total
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.total.add_(grad.sum())
        return grad, None


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Accumulates.apply(x, self.total)


@pytest.mark.parametrize(
    "module, words",
    [
        (Applies(Branches.apply), r"backward of \S*Branches(.|\n)*needs the value of a tensor in Python"),
        (Applies(lambda x: TooFew.apply(x, x)), r"incorrect number of gradients \(expected 2, got 1\)"),
        (Counts(), r"backward of an autograd\.Function changes what is not its own"),
    ],
)
def test_a_backward_that_cannot_be_followed_is_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(BridgeError, match=words):
        convert(module, (torch.ones(2, 3),))


def test_a_function_is_torchs_again_afterwards() -> None:
    convert(Applies(Swish.apply), (torch.ones(2, 3),))
    x = torch.ones(2, requires_grad=True)
    StraightThrough.apply(x).sum().backward()
    assert x.grad is not None
