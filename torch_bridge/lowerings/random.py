"""Random operators: the node's key comes as `rng`. The distribution is torch's, the bits are JAX's."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_bridge import layout
from torch_bridge.layout import ChannelsLast
from torch_bridge.lowerings.layouts import in_space
from torch_bridge.lowerings.registry import always, lowering
from torch_bridge.tensors import default_float, jax_dtype

aten = torch.ops.aten


def _dropout_is_on(_x: Any, p: float, train: bool | None, *_: Any, **__: Any) -> bool:
    return train is not False and p > 0.0


@lowering(aten.native_dropout.default, random=_dropout_is_on, layouts=in_space())
def native_dropout(
    x: Any, p: float, train: bool | None, *, rng: Any = None, channels_last: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(dropped values, mask of the kept). The mask is drawn in torch's order, whatever x's."""
    del train  # in eval mode there is no key
    shape = ChannelsLast(x).shape if channels_last else x.shape
    if rng is None:
        return x, jnp.ones(shape, bool)
    if p >= 1.0:
        return jnp.zeros_like(x), jnp.zeros(shape, bool)
    drawn = jax.random.bernoulli(rng, 1.0 - p, shape)
    kept = layout.channels_last(drawn) if channels_last else drawn
    return jnp.where(kept, x / (1.0 - p), jnp.zeros_like(x)), drawn


@lowering(aten.dropout.default, random=_dropout_is_on, layouts=in_space())
def dropout(x: Any, p: float, train: bool, *, rng: Any = None, channels_last: bool = False) -> jax.Array:
    return native_dropout(x, p, train, rng=rng, channels_last=channels_last)[0]


def _float_dtype(dtype: Any) -> Any:
    return default_float() if dtype is None else jax_dtype(dtype)


@lowering(aten.rand.default, random=always)
def rand(size: Any, *, rng: Any, dtype: Any = None, **_: Any) -> jax.Array:
    return jax.random.uniform(rng, size, _float_dtype(dtype))


@lowering(aten.randn.default, random=always)
def randn(size: Any, *, rng: Any, dtype: Any = None, **_: Any) -> jax.Array:
    return jax.random.normal(rng, size, _float_dtype(dtype))


@lowering(aten.rand_like.default, random=always)
def rand_like(x: Any, *, rng: Any, dtype: Any = None, **_: Any) -> jax.Array:
    return jax.random.uniform(rng, x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@lowering(aten.randn_like.default, random=always)
def randn_like(x: Any, *, rng: Any, dtype: Any = None, **_: Any) -> jax.Array:
    return jax.random.normal(rng, x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@lowering(aten.randint.default, random=always)
def randint(high: int, size: Any, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.randint(rng, size, 0, high)


@lowering(aten.randint.low, random=always)
def randint_low(low: int, high: int, size: Any, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.randint(rng, size, low, high)


@lowering(aten.randint_like.default, random=always)
def randint_like(x: Any, high: int, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.randint(rng, x.shape, 0, high)


@lowering(aten.randint_like.low_dtype, random=always)
def randint_like_low(x: Any, low: int, high: int, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.randint(rng, x.shape, low, high)


@lowering(aten.randperm.default, random=always)
def randperm(n: int, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.permutation(rng, n)


@lowering(aten.bernoulli.default, random=always)
def bernoulli(p: Any, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.bernoulli(rng, p, p.shape)


@lowering(aten.bernoulli.p, random=always)
def bernoulli_p(x: Any, p: float = 0.5, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.bernoulli(rng, p, x.shape)


@lowering(aten.bernoulli.Tensor, random=always)
def bernoulli_tensor(x: Any, p: Any, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.bernoulli(rng, jnp.broadcast_to(p, x.shape), x.shape)


@lowering(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, random=always)
def normal(mean: Any, std: Any = 1.0, *, rng: Any, **_: Any) -> jax.Array:
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    dtype = jnp.result_type(mean, std)
    return mean + std * jax.random.normal(rng, shape, dtype)


@lowering(aten.normal.float_float, random=always)
def normal_float(mean: float, std: float, size: Any, *, rng: Any, dtype: Any = None, **_: Any) -> jax.Array:
    return mean + std * jax.random.normal(rng, size, _float_dtype(dtype))


@lowering(aten.normal_functional.default, random=always)
def normal_functional(x: Any, mean: float = 0.0, std: float = 1.0, *, rng: Any, **_: Any) -> jax.Array:
    return mean + std * jax.random.normal(rng, x.shape, x.dtype)


@lowering(aten.uniform.default, random=always)
def uniform(x: Any, low: float = 0.0, high: float = 1.0, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.uniform(rng, x.shape, x.dtype, low, high)


@lowering(aten.exponential.default, random=always)
def exponential(x: Any, rate: float = 1.0, *, rng: Any, **_: Any) -> jax.Array:
    return jax.random.exponential(rng, x.shape, x.dtype) / rate


@lowering(aten.geometric.default, random=always)
def geometric(x: Any, p: float, *, rng: Any, **_: Any) -> jax.Array:
    u = jax.random.uniform(rng, x.shape, jnp.float32, minval=jnp.finfo(jnp.float32).tiny)
    return jnp.ceil(jnp.log(u) / math.log1p(-p)) if p < 1.0 else jnp.ones_like(u)


@lowering(aten.cauchy.default, random=always)
def cauchy(x: Any, median: float = 0.0, sigma: float = 1.0, *, rng: Any, **_: Any) -> jax.Array:
    return median + sigma * jax.random.cauchy(rng, x.shape, x.dtype)


@lowering(aten.log_normal.default, random=always)
def log_normal(x: Any, mean: float = 1.0, std: float = 2.0, *, rng: Any, **_: Any) -> jax.Array:
    return jnp.exp(mean + std * jax.random.normal(rng, x.shape, x.dtype))


@lowering(aten.multinomial.default, random=always)
def multinomial(
    weights: Any, num_samples: int, replacement: bool = False, *, rng: Any, **_: Any
) -> jax.Array:
    logits = jnp.log(weights)
    if replacement:
        drawn = jax.random.categorical(rng, logits, shape=(num_samples, *weights.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    # Without replacement: the largest of logits + Gumbel noise (Kool et al. 2019).
    noisy = logits + jax.random.gumbel(rng, weights.shape, logits.dtype)
    return jax.lax.top_k(noisy, num_samples)[1]


def _noisy(
    _x: Any, _noise: Any, _lower: Any = 0.125, _upper: Any = 1 / 3, training: bool = False, *_: Any
) -> bool:
    return bool(training)


@lowering(aten.rrelu_with_noise_functional.default, random=_noisy)
def rrelu_with_noise(
    x: Any, noise: Any, lower: float = 0.125, upper: float = 1 / 3, *_: Any, rng: Any = None, **__: Any
) -> tuple[jax.Array, jax.Array]:
    """(values, slopes): a random slope for each negative value in training, their mean otherwise."""
    if rng is None:
        return jnp.where(x >= 0, x, x * ((lower + upper) / 2)), noise
    slopes = jax.random.uniform(rng, x.shape, x.dtype, lower, upper)
    slopes = jnp.where(x <= 0, slopes, jnp.ones_like(x))
    return x * slopes, slopes
