"""The same calls in torch and in JAX: named values of a few forward passes, gradients and updates.

Both sides return a flat dict: ("outputs", rows, i), ("loss", step), ("gradient", name), ("parameter",
name), ("state", name) -> value. What is trained is the network's loss, or, where it returns none, a
fixed linear function of everything that it returns.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

import torch_bridge
from tests.torch_bridge.zoo.specimen import Batch, split
from torch_bridge.tensors import to_jax

ROWS = (3, 1, 8)  # gradients and updates at the first
NUM_STEPS = 2
RATE, MOMENTUM = 0.02, 0.9
Values = dict[tuple[Any, ...], Any]


class TorchFails(Exception):
    """PyTorch itself cannot run this."""


def warm_up(module: nn.Module, batch: Batch) -> None:
    """One call, for modules whose parameters are made by it."""
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        torch.manual_seed(0)
        args, kwargs = split(batch)
        module(*args, **kwargs)


def draws(fresh: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch's seed changes what a network returns.

    Raises:
        TorchFails: torch cannot run the network.
    """
    results = []
    try:
        for seed in (1, 2):
            module = fresh()
            torch.manual_seed(seed)
            with torch.no_grad():
                results.append(_tensors(module(*args, **kwargs)))
    except Exception as error:
        raise TorchFails from error
    return any(not torch.equal(a, b) for a, b in zip(*results, strict=True))


def in_torch(fresh: Callable[[], nn.Module], batch: Callable[[int], Batch], *, inputs: bool = True) -> Values:
    """Values of torch eager. Row counts that torch refuses are left out, but for the first.

    Raises:
        TorchFails: torch cannot run the network.
    """
    values: Values = {}
    try:
        for rows in ROWS:
            args, kwargs = split(batch(rows))
            module = fresh()
            try:
                with torch.no_grad():
                    outputs = module(*args, **kwargs)
            except Exception:
                if rows == ROWS[0]:
                    raise
                continue
            values |= {("outputs", rows, i): _numpy(leaf) for i, leaf in enumerate(_tensors(outputs))}
        return values | _torch_training(fresh(), batch(ROWS[0]), inputs)
    except Exception as error:
        raise TorchFails from error


def _torch_training(module: nn.Module, batch: Batch, inputs: bool) -> Values:
    values: Values = {}
    leaves, spec = torch_pytree.tree_flatten(split(batch))
    leaves = [x.clone().requires_grad_() if inputs and _is_floating(x) else x for x in leaves]
    named = dict(module.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=RATE, momentum=MOMENTUM) if trained else None
    for step in range(NUM_STEPS):
        # `* 1`: a network may write to its input, which torch forbids for leaves.
        moving = [x * 1 if isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves]
        args, kwargs = torch_pytree.tree_unflatten(moving, spec)
        loss, size = objective(module(*args, **kwargs))
        values["loss", step] = np.array([_numpy(loss), _numpy(size)])
        module.zero_grad()
        if loss.requires_grad:
            loss.backward()
        if step == 0:
            for name, p in trained.items():
                values["gradient", name] = _gradient(p)
            for i, x in enumerate(leaves):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    values["gradient", f"input {i}"] = _gradient(x)
        if optimizer is not None:
            # Parameters without a gradient move by nothing, as in JAX.
            optimizer.step()
    values |= {("parameter", name): _numpy(p) for name, p in trained.items()}
    frozen = {name: p for name, p in named.items() if name not in trained}
    return values | {("state", name): _numpy(b) for name, b in [*module.named_buffers(), *frozen.items()]}


def in_jax(
    converted: torch_bridge.JaxModule, batch: Callable[[int], Batch], wanted: Collection[tuple[Any, ...]]
) -> Values:
    """Values of the conversion, at the row counts that `wanted` has."""
    key = jax.random.key(0)

    def call(params: Any, buffers: Any, tensors: Any) -> tuple[Any, tuple[list[Any], Any]]:
        args, kwargs = tensors
        outputs, new = converted.apply(params, buffers, *args, frozen=converted.frozen, rng=key, **kwargs)
        loss, size = objective(outputs)
        return loss, (_tensors(outputs), size, new)

    values: Values = {}
    for rows in ROWS[1:]:
        if not any(name[:2] == ("outputs", rows) for name in wanted):
            continue
        fixed, moving, join = _taken_apart(batch(rows))
        outputs = jax.jit(lambda p, b, m, f, join=join: call(p, b, join(m, f))[1][0])(
            converted.params, converted.buffers, moving, fixed
        )
        values |= {("outputs", rows, i): np.asarray(leaf) for i, leaf in enumerate(outputs)}
    return values | _jax_training(converted, call, batch(ROWS[0]))


def _jax_training(converted: torch_bridge.JaxModule, call: Callable[..., Any], batch: Batch) -> Values:
    values: Values = {}
    fixed, moving, join = _taken_apart(batch)

    def loss(params: Any, moving: Any, buffers: Any) -> Any:
        return call(params, buffers, join(moving, fixed))

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    params, buffers = converted.params, converted.buffers
    optimizer = optax.sgd(RATE, momentum=MOMENTUM)
    state = optimizer.init(params)
    for step in range(NUM_STEPS):
        (value, (outputs, size, buffers)), found = run(params, moving, buffers)
        # Of a complex parameter JAX gives the derivative, torch its conjugate, the direction of descent.
        gradients, of_inputs = jax.tree.map(jnp.conj, found)
        values["loss", step] = np.array([value, size])
        if step == 0:
            values |= {("outputs", ROWS[0], i): np.asarray(leaf) for i, leaf in enumerate(outputs)}
            values |= {("gradient", name): np.asarray(g) for name, g in gradients.items()}
            values |= {("gradient", f"input {i}"): np.asarray(g) for i, g in of_inputs.items()}
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    saved = converted.to_state_dict(params, buffers)
    values |= {("parameter", name): _numpy(saved[name]) for name in params}
    return values | {("state", name): np.asarray(b) for name, b in buffers.items()}


def dropout_problems(converted: torch_bridge.JaxModule, batch: Batch) -> list[str]:
    """What is wrong with the random numbers of a network in training."""
    fixed, moving, join = _taken_apart(batch)

    def call(params: Any, key: Any) -> Any:
        args, kwargs = join(moving, fixed)
        outputs, _ = converted.apply(
            params, converted.buffers, *args, frozen=converted.frozen, rng=key, **kwargs
        )
        return objective(outputs)[0]

    run = jax.jit(jax.value_and_grad(call))
    runs = [run(converted.params, jax.random.key(seed)) for seed in (0, 0, 1)]
    same = jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), runs[0], runs[1]))
    finite = jax.tree.all(jax.tree.map(lambda a: bool(jnp.isfinite(a).all()), runs[0]))
    found = {
        "not finite": not finite,
        "one key, two results": not same,
        "two keys, one result": bool(runs[0][0] == runs[2][0]),
    }
    return [problem for problem, is_found in found.items() if is_found]


def objective(outputs: Any) -> tuple[Any, Any]:
    """(what is trained, its magnitude), real scalars: the loss, or a fixed linear function of all outputs.

    Terms of the latter cancel; its error is measured by the magnitude, which has their absolute values.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    leaves = _tensors(outputs)
    if loss is None and len(leaves) == 1 and leaves[0].ndim == 0:
        loss = leaves[0]
    if loss is not None and loss.ndim == 0 and not _is_complex(loss):
        return loss, loss * 0
    terms = [_weighted(leaf) for leaf in leaves if _is_complex(leaf) or _has_floats(leaf)]
    if not terms:
        zero = torch.zeros(()) if leaves and isinstance(leaves[0], torch.Tensor) else jnp.zeros(())
        return zero, zero
    return sum(a for a, _ in terms), sum(b for _, b in terms)


def _weighted(leaf: Any) -> tuple[Any, Any]:
    """Means of an output times fixed weights, and of its absolute value, in float32 at least."""
    weights = np.cos(np.arange(int(np.prod(leaf.shape)), dtype=np.float64)).reshape(leaf.shape)
    real = leaf.real + leaf.imag if _is_complex(leaf) else leaf
    if isinstance(leaf, torch.Tensor):
        real = real.to(torch.promote_types(real.dtype, torch.float32))
        return (real * torch.from_numpy(weights).to(real.dtype)).mean(), real.detach().abs().mean()
    real = real.astype(jnp.promote_types(real.dtype, jnp.float32))
    size = jnp.mean(jnp.abs(jax.lax.stop_gradient(real)))
    return jnp.mean(real * jnp.asarray(weights, real.dtype)), size


def _has_floats(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point()
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _is_complex(leaf: Any) -> bool:
    return (
        leaf.is_complex()
        if isinstance(leaf, torch.Tensor)
        else jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    )


def doubled(batch: Batch) -> Batch:
    """A batch with floats in float64."""
    return torch_pytree.tree_map(lambda x: x.double() if _is_floating(x) else x, batch)


def _taken_apart(batch: Batch) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """(fixed arrays, float arrays, a function that makes args and kwargs of both); by position."""
    leaves, spec = torch_pytree.tree_flatten(split(batch))
    floating = {i for i, x in enumerate(leaves) if _is_floating(x)}
    arrays = {i: to_jax(x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    moving = {i: x for i, x in arrays.items() if i in floating}
    fixed = {i: x for i, x in arrays.items() if i not in floating}

    def join(moving: Any, fixed: Any) -> Any:
        values = {**moving, **fixed}
        return torch_pytree.tree_unflatten([values.get(i, x) for i, x in enumerate(leaves)], spec)

    return fixed, moving, join


def _tensors(outputs: Any) -> list[Any]:
    """All of them, those in attributes of plain objects included."""
    found: list[Any] = []
    for leaf in torch_pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor | jax.Array):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            found += _tensors(list(vars(leaf).values()))
    return found


def _gradient(x: torch.Tensor) -> np.ndarray:
    if x.grad is None:
        return np.zeros(tuple(x.shape), np.float32)
    return _numpy(x.grad.to_dense() if x.grad.is_sparse else x.grad)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return np.array(tensor.numpy())
