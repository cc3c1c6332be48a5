"""STUB until the batch branch arrives."""
import jax, jax.numpy as jnp
from rannc_jax.ir.evaluate import bind

def random_rows_hook(layout, local_rows, parts, part):
    def hook(eqn, values):
        shape = list(eqn.params["shape"]); size = shape[layout.dim]
        shape[layout.dim] = size * parts
        (bits,) = bind(eqn.replace(params={**eqn.params, "shape": tuple(shape)}), values)
        return [jax.lax.dynamic_slice_in_dim(bits, part * size, size, axis=layout.dim)]
    return hook

def row_mask_hook(mask, valid, scale):
    def hook(eqn, values):
        values = list(values); x = values[mask.operand]
        m = jnp.repeat(valid, mask.layout.inner)
        m = m.reshape([-1 if d == mask.layout.dim else 1 for d in range(x.ndim)])
        x = jnp.where(m, x, jnp.zeros_like(x))
        values[mask.operand] = x if scale is None else x * jnp.asarray(scale, x.dtype)
        return bind(eqn, values)
    return hook
