"""Random programs: whatever the analysis calls separable must be so, in numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rannc_jax.ir.batch import LossKind
from tests.ir.batch_tools import Case, combined, gap, look, value_and_grad

pytestmark = pytest.mark.filterwarnings("ignore:core.Jaxpr is missing a DebugInfo:DeprecationWarning")

ROWS, WIDTH = 6, 4

TO_ROWS = {
    "tanh": lambda x, y, v, s: jnp.tanh(x),
    "add": lambda x, y, v, s: x + y,
    "sub": lambda x, y, v, s: x - y,
    "mul": lambda x, y, v, s: x * y,
    "div": lambda x, y, v, s: x / (1 + y * y),
    "where": lambda x, y, v, s: jnp.where(x > y, x, y * y),
    "masked": lambda x, y, v, s: jnp.where(y > 0, x, 0.0),
    "sort rows": lambda x, y, v, s: jnp.sort(x, axis=0),
    "sort": lambda x, y, v, s: jnp.sort(x, axis=1),
    "cumsum rows": lambda x, y, v, s: jnp.cumsum(x, axis=0),
    "cumsum": lambda x, y, v, s: jnp.cumsum(x, axis=1),
    "roll rows": lambda x, y, v, s: jnp.roll(x, 1, axis=0),
    "roll": lambda x, y, v, s: jnp.roll(x, 1, axis=1),
    "flip rows": lambda x, y, v, s: x[::-1],
    "softmax rows": lambda x, y, v, s: jax.nn.softmax(x, axis=0),
    "softmax": lambda x, y, v, s: jax.nn.softmax(x, axis=1),
    "gram": lambda x, y, v, s: (x @ y.T) @ x,
    "cross": lambda x, y, v, s: x @ (y.T @ x),
    "numbered": lambda x, y, v, s: x * jnp.arange(x.shape[0], dtype=jnp.float32)[:, None],
    "own": lambda x, y, v, s: x + y[jnp.arange(x.shape[0]), 1][:, None],
    "flat": lambda x, y, v, s: (x.reshape(-1) * y.reshape(-1)).reshape(x.shape),
    "turned": lambda x, y, v, s: (x.T.reshape(-1) * y.T.reshape(-1)).reshape(x.shape[::-1]).T,
    "mixed up": lambda x, y, v, s: x.T.reshape(x.shape) + y,
    "pairs": lambda x, y, v, s: sum(jnp.split(jnp.concatenate([x, y], 0), 2, 0)),
    "interleaved": lambda x, y, v, s: jnp.stack([x, y], 1).reshape(-1, x.shape[1])[: x.shape[0]],
    "shift by vector": lambda x, y, v, s: x - v,
    "times vector": lambda x, y, v, s: x * v,
    "over scalar": lambda x, y, v, s: x / s,
    "over rows": lambda x, y, v, s: x / x.shape[0],
    "less than": lambda x, y, v, s: (x < v).astype(jnp.float32),
}  # fmt: skip
TO_VECTOR = {
    "mean": lambda x, v, s: jnp.mean(x, 0),
    "sum": lambda x, v, s: jnp.sum(x, 0),
    "max": lambda x, v, s: jnp.max(x, 0),
    "first": lambda x, v, s: x[0],
    "dot": lambda x, v, s: x[:, 0] @ x,
    "square": lambda x, v, s: v * v,
    "scaled": lambda x, v, s: v * s,
    "one": lambda x, v, s: jnp.sum(jnp.ones_like(x), 0),
}
TO_SCALAR = {
    "mean": lambda x, v, s, t: jnp.mean(x),
    "sum": lambda x, v, s, t: jnp.sum(x),
    "sum vector": lambda x, v, s, t: jnp.sum(v),
    "add": lambda x, v, s, t: s + t,
    "sub": lambda x, v, s, t: s - t,
    "mul": lambda x, v, s, t: s * t,
    "div": lambda x, v, s, t: s / t,
    "guarded": lambda x, v, s, t: s / jnp.maximum(t, 1.0),
    "safe": lambda x, v, s, t: jnp.where(t > 0, s / jnp.where(t > 0, t, 1.0), 0.0),
    "root": lambda x, v, s, t: jnp.sqrt(1 + s * s),
    "over rows": lambda x, v, s, t: s / x.shape[0],
    "times rows": lambda x, v, s, t: s * x.shape[0],
    "count": lambda x, v, s, t: jnp.sum((x > 0).astype(jnp.float32)),
    "variance": lambda x, v, s, t: jnp.var(x),
    "plus one": lambda x, v, s, t: s + 1.0,
}


def random_loss(seed: int) -> Any:
    """A loss made of a few random steps; the last scalar, or a sum of the last rows."""
    plan = np.random.default_rng(seed).integers(0, 10**6, size=(int(seed) % 4 + 2, 6)).tolist()

    def loss(params: Any, batch: Any) -> Any:
        rows, vectors = [batch["x"] * params["w"], batch["m"]], [params["w"]]
        scalars = [jnp.sum(batch["m"]), jnp.sum(params["w"] ** 2)]
        newest: Any = rows[0]

        def pick(items: list[Any], number: int) -> Any:
            return items[-1 - number % len(items)]

        for kind, which, *numbers in plan:
            x, y = pick(rows, numbers[0]), pick(rows, numbers[1])
            v, s, t = pick(vectors, numbers[1]), pick(scalars, numbers[2]), pick(scalars, numbers[3])
            if kind % 5 < 2:
                newest = list(TO_ROWS.values())[which % len(TO_ROWS)](x, y, v, s)
                rows.append(newest)
            elif kind % 5 == 2:
                newest = list(TO_VECTOR.values())[which % len(TO_VECTOR)](x, v, s)
                vectors.append(newest)
            else:
                newest = list(TO_SCALAR.values())[which % len(TO_SCALAR)](x, v, s, t)
                scalars.append(newest)
        if newest.shape == batch["m"].shape:
            newest = newest * batch["m"]  # so that the order of rows matters
        return newest if newest.ndim == 0 else (jnp.sum(newest) if seed % 3 else jnp.mean(newest))

    return loss


def case_of(seed: int) -> Case:
    rng = np.random.default_rng([1, seed])
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    mask = jnp.asarray(
        rng.uniform(0.5, 2, size=(ROWS, WIDTH)) * (rng.uniform(size=(ROWS, 1)) > 0.3), jnp.float32
    )
    params = {"w": jnp.asarray(rng.normal(size=WIDTH), jnp.float32)}
    return Case(fn=random_loss(seed), params=params, batch={"x": x, "m": mask.at[0].set(1).at[-1].set(1.5)})


def judged(seed: int) -> bool | None:
    """Is a loss called separable really so? None if it is not called that, or has no finite value."""
    case = case_of(seed)
    program, info = look(case)
    if info.couplings or info.loss is None or info.loss.kind is LossKind.MEAN_OF_MEANS:
        return None
    whole = value_and_grad(case, case.batch)
    parts = combined(case, program, info.loss, (4, 2))
    if not all(np.isfinite(x).all() for x in jax.tree.leaves((whole, parts))):
        return None
    return gap(parts, whole) < 1e-4


@pytest.mark.parametrize("seed", range(40, 64))  # these catch a broken reshape rule and unreported statistics
def test_a_random_loss_called_separable_is_separable(seed: int) -> None:
    assert judged(seed) is not False
