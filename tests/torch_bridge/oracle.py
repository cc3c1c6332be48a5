"""torch eager as the oracle: values, gradients and buffers of a module against its conversion."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torch_bridge
from torch_bridge.tensors import to_jax

# RUNTIME.md, "How equality is measured".
TREE_TOLERANCE = 1e-4
LEAF_FLOOR = 1e-6


def arrays(batch: Mapping[str, torch.Tensor]) -> dict[str, jax.Array]:
    return {name: to_jax(tensor) for name, tensor in batch.items()}


def assert_same_gradients(got: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Gradients relative to the whole tree's norm, and per leaf above the rounding floor."""
    want = {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    assert set(got) == set(want)
    errors = {name: np.linalg.norm(np.asarray(got[name]) - want[name]) for name in want}
    sizes = {name: np.linalg.norm(want[name]) for name in want}
    whole = np.sqrt(sum(size**2 for size in sizes.values()))
    assert np.sqrt(sum(error**2 for error in errors.values())) <= TREE_TOLERANCE * whole
    for name, size in sizes.items():
        if size > LEAF_FLOOR * whole:
            assert errors[name] <= 1e-3 * size, f"{name}: {errors[name]:.2e} of {size:.2e}"


def loss_and_gradients(
    converted: torch_bridge.JaxModule, batch: Any, **extra: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(loss, gradients, new model_state) of a converted module, under jit."""
    loss_fn = converted.loss_fn

    def with_state(params: Any) -> tuple[Any, Any]:
        out = loss_fn(params, batch, **extra)
        return (out.loss, out.model_state) if isinstance(out, torch_bridge.ModuleLoss) else (out, {})

    (loss, state), gradients = jax.jit(jax.value_and_grad(with_state, has_aux=True))(converted.params)
    return loss, gradients, state


class Calls(torch.nn.Module):
    """Several functions of the same tensors in one module: one export and one compile for a family."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = list(functions)

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        return [function(*tensors) for function in self.functions]


class _Apart(Calls):
    """Every function has floating tensors of its own, so one pull gives the gradients of all.

    `shared` holds the other tensors, None where a floating one belongs.
    """

    def forward(self, shared: Sequence[torch.Tensor | None], own: Sequence[Sequence[torch.Tensor]]) -> Any:
        results = []
        for function, floating in zip(self.functions, own, strict=True):
            remaining = iter(floating)
            results.append(function(*(next(remaining) if x is None else x for x in shared)))
        return results


def assert_same_functions(
    cases: Mapping[str, Callable[..., Any]], tensors: Sequence[torch.Tensor], *, tolerance: float = 1e-4
) -> torch_bridge.JaxModule:
    """Values and vector-Jacobian products of every function equal torch's, dtypes and shapes included.

    Returns:
        The functions, converted as one module.
    """
    module = _Apart(list(cases.values()))
    shared = [None if t.is_floating_point() else t for t in tensors]
    leaves = [[t.clone().requires_grad_() for t in tensors if t.is_floating_point()] for _ in cases]
    example = shared, [[x.detach() for x in own] for own in leaves]
    converted = torch_bridge.convert(module, example, batch_dims=jax.tree.map(lambda _: None, example))
    expected = module(shared, leaves)

    def floating_outputs(fixed: Any, moving: Any) -> tuple[list[list[Any]], Any]:
        outputs = converted.apply({}, converted.buffers, fixed, moving)[0]
        per_case = [
            [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)] for out in outputs
        ]
        return per_case, outputs

    @jax.jit
    def everything(fixed: Any, moving: Any) -> tuple[Any, Any]:
        per_case, pull, outputs = jax.vjp(partial(floating_outputs, fixed), moving, has_aux=True)
        (gradients,) = pull(jax.tree.map(lambda x: jnp.asarray(_seed(x.shape), x.dtype), per_case))
        return outputs, [own if case else None for own, case in zip(gradients, per_case, strict=True)]

    outputs, gradients = everything(*jax.tree.map(to_jax, example))
    for name, got, want, gradient, given in zip(cases, outputs, expected, gradients, leaves, strict=True):
        flat = _tensors(want)
        _assert_values(name, jax.tree.leaves(got), flat, tolerance)
        if gradient is not None:
            _assert_vjp(name, gradient, flat, given, tolerance)
    return converted


def _seed(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(np.arange(int(np.prod(shape)), dtype=np.float32)).reshape(shape)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for part in value for item in _tensors(part)]


def _assert_values(name: str, got: Sequence[Any], want: Sequence[torch.Tensor], tolerance: float) -> None:
    assert len(got) == len(want), name
    for a, b in zip(got, want, strict=True):
        reference = to_jax(b)
        assert a.shape == reference.shape, f"{name}: shape {a.shape}, torch {reference.shape}"
        assert a.dtype == reference.dtype, f"{name}: dtype {a.dtype}, torch {reference.dtype}"
        np.testing.assert_allclose(
            np.asarray(a, np.float64),
            np.asarray(reference, np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


def _assert_vjp(
    name: str,
    got: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    tolerance: float,
) -> None:
    moving = [out for out in outputs if out.requires_grad]
    if not moving:
        assert all(not np.any(np.asarray(g)) for g in got), f"{name}: torch has no gradient, JAX has"
        return
    seeds = [torch.from_numpy(_seed(tuple(out.shape))).to(out.dtype) for out in moving]
    want = torch.autograd.grad(moving, leaves, seeds, allow_unused=True, retain_graph=True)
    for a, b in zip(got, want, strict=True):
        reference = np.zeros(a.shape) if b is None else b.float().numpy(force=True)
        np.testing.assert_allclose(
            np.asarray(a, np.float32),
            reference,
            rtol=10 * tolerance,
            atol=tolerance,
            err_msg=f"{name}: gradient",
        )
