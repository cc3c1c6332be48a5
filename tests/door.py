"""Small networks, and what a demanding user checks: the step equals the function it was made from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rannc_jax

WIDTH = 8


def layers(count: int = 4, width: int = WIDTH, seed: int = 0) -> list[dict[str, Any]]:
    """Weights [width, width] and biases [width]."""
    keys = jax.random.split(jax.random.key(seed), count)
    return [
        {"w": jax.random.normal(k, (width, width)) / width**0.5, "b": jnp.full((width,), 0.1)} for k in keys
    ]


def rows(count: int = 8, width: int = WIDTH, seed: int = 1) -> dict[str, Any]:
    """Inputs and targets [count, width]."""
    x = jax.random.normal(jax.random.key(seed), (count, width))
    return {"x": x, "y": jnp.flip(x, -1)}


def net(params: Any, x: Any) -> Any:
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((net(params, batch["x"]) - batch["y"]) ** 2)


def assert_close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Both trees are the same up to rounding, leaf by leaf, relative to the size of the leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        a, b = a.astype(np.float64), b.astype(np.float64)
        scale = max(float(np.max(np.abs(b), initial=0)), 1e-6)
        np.testing.assert_allclose(
            a / scale, b / scale, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        )


def train(fn: Any, params: Any, batch: Any, *, init: Any = None, **settings: Any) -> tuple[Any, Any]:
    """A step of two stages and two microbatches under 1F1B (unless said otherwise), and its first state."""
    usual = {"optimizer": optax.sgd(0.1), "num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
    settings = usual | settings
    step = rannc_jax.auto_partition(fn, **settings)
    return step, step.init(params, batch, **(init or {}))


def check_gradients(fn: Any, params: Any, batch: Any, *, tolerance: float = 1e-5, **settings: Any) -> Any:
    """Loss and gradients of the whole batch equal JAX's own for `fn(params, batch) -> loss`."""
    step, state = train(fn, params, batch, **settings)
    out, grads = step.value_and_grad(state, batch)
    loss, expected = jax.value_and_grad(fn)(params, batch)
    assert_close(out.loss, jnp.asarray(loss, out.loss.dtype), tolerance)
    assert_close(step.gather(grads), expected, tolerance)
    return step, state
