"""The operators of a training loop that run where the values are.

Each is one small compiled program. Numbers are arguments, so another learning rate or clipping factor
compiles nothing. Scalars (norms, factors) that lie with another stage are moved to the array they meet.
What is not here, or mixes dtypes, is for the host.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding

from rannc_jax.runtime.transfer import move
from torch_bridge.drop_in.storage import TRAFFIC, Storage
from torch_bridge.tensors import TORCH_DTYPES, to_jax

StorageOf = Callable[[Any], Storage | None]
_aten = torch.ops.aten


def _norm(x: Any, order: Any = 2) -> Any:
    x = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    if order == float("inf"):
        return jnp.max(x)
    if order == 2:
        return jnp.sqrt(jnp.sum(x * x))
    return jnp.sum(x) if order == 1 else jnp.sum(x**order) ** (1.0 / order)


def _vector_norm(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    if (dim is not None and len(dim) != x.ndim) or keepdim or order in (0, float("-inf")):
        raise _OnHostError
    return _norm(x, order).astype(x.dtype)


def _reduce(function: Callable[[Any], Any]) -> Callable[..., Any]:
    def reduce(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is not None or keepdim:
            raise _OnHostError
        return function(x)

    return reduce


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    return jnp.clip(x, low, high)


def _power(x: Any, exponent: Any) -> Any:
    return x * x if exponent == 2 else x**exponent


_MATHS: dict[str, Callable[..., Any]] = {
    "add.Tensor": lambda x, y, alpha=1: x + y * alpha,
    "sub.Tensor": lambda x, y, alpha=1: x - y * alpha,
    "rsub.Scalar": lambda x, y, alpha=1: y - x * alpha,
    "mul.Tensor": jnp.multiply,
    "mul.Scalar": jnp.multiply,
    "div.Tensor": jnp.divide,
    "div.Scalar": jnp.divide,
    "pow.Tensor_Scalar": _power,
    "addcmul.default": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv.default": lambda x, a, b, value=1: x + value * (a / b),
    "lerp.Scalar": lambda x, y, weight: x + weight * (y - x),
    "neg.default": jnp.negative,
    "abs.default": jnp.abs,
    "sqrt.default": jnp.sqrt,
    "rsqrt.default": jax.lax.rsqrt,
    "reciprocal.default": lambda x: 1 / x,
    "exp.default": jnp.exp,
    "log.default": jnp.log,
    "sign.default": jnp.sign,
    "isnan.default": jnp.isnan,
    "isinf.default": jnp.isinf,
    "isfinite.default": jnp.isfinite,
    "clamp.default": _clamp,
    "clamp_min.default": _clamp,
    "clamp_max.default": lambda x, high: _clamp(x, None, high),
    "nan_to_num.default": lambda x, nan=None, posinf=None, neginf=None: jnp.nan_to_num(
        x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf
    ),
    "logical_not.default": jnp.logical_not,
    "logical_and.default": jnp.logical_and,
    "logical_or.default": jnp.logical_or,
    "bitwise_and.Tensor": jnp.bitwise_and,
    "linalg_vector_norm.default": _vector_norm,
    "norm.Scalar": _vector_norm,
    "sum.default": _reduce(jnp.sum),
    "mean.default": _reduce(jnp.mean),
    "max.default": _reduce(jnp.max),
    "min.default": _reduce(jnp.min),
    "any.default": _reduce(jnp.any),
    "all.default": _reduce(jnp.all),
    "amax.default": _reduce(jnp.max),
    "maximum.default": jnp.maximum,
    "minimum.default": jnp.minimum,
    "clone.default": jnp.copy,
}
_MATHS |= {
    f"{name}.{kind}": getattr(jnp, full)
    for name, full in {
        "eq": "equal",
        "ne": "not_equal",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
    }.items()
    for kind in ("Scalar", "Tensor")
}
_BY_NUMBER = {_power, _vector_norm}
"""What a number decides the program of."""


class _OnHostError(Exception):
    """This form of the operator is for the host."""


def on_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], storage_of: StorageOf) -> Any:
    """Run an operator on the devices.

    Args:
        func: an ATen overload.
        args, kwargs: as `__torch_dispatch__` has them.
        storage_of: the storage of an argument that has one.

    Returns:
        A `Storage` or a list of them for new values, the argument itself where it was written, a Python
        number for `item()`; NotImplemented: for the host.
    """
    name = func.__name__  # "mul_.Tensor"
    try:
        if name in _SPECIAL:
            return _SPECIAL[name](args, kwargs, storage_of)
        if name.startswith("_foreach_"):
            return _foreach(name, args, kwargs, storage_of)
        base, _, overload = name.partition(".")
        if base.endswith("_") and f"{base[:-1]}.{overload}" in _MATHS:
            return _write(args[0], _MATHS[f"{base[:-1]}.{overload}"], args, kwargs, storage_of)
        return _compute(_MATHS[name], args, kwargs, storage_of) if name in _MATHS else NotImplemented
    except _OnHostError:
        return NotImplemented


def _compute(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], of: StorageOf
) -> Storage:
    return _stored(_run(function, args, kwargs, of))


def _write(
    target: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], of: StorageOf
) -> Any:
    storage = of(target)
    if storage is None:
        raise _OnHostError
    result = _run(function, args, kwargs, of)
    if result.shape != storage.shape or result.dtype != storage.array.dtype:
        raise _OnHostError
    storage.replace(result)
    return target


def _stored(array: jax.Array) -> Storage:
    return Storage(array, TORCH_DTYPES[array.dtype])


def _run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], of: StorageOf
) -> jax.Array:
    """One operator on arrays: storages and floats are arguments of the program, the rest is part of it."""
    if kwargs.get("dtype") is not None:
        raise _OnHostError
    names = tuple(name for name, value in kwargs.items() if value is not None and name != "memory_format")
    given = [*args, *(kwargs[name] for name in names)]
    arrays: list[Any] = []
    fixed: list[Any] = []
    for value in given:
        storage, number = of(value), _number(value)
        if storage is not None:
            arrays.append(storage.array)
            fixed.append(_DYNAMIC)
        elif isinstance(number, float) and function not in _BY_NUMBER:
            arrays.append(number)
            fixed.append(_DYNAMIC)
        elif isinstance(value, torch.Tensor) and number is None:
            raise _OnHostError
        else:
            fixed.append(tuple(value) if isinstance(value, list) else value if number is None else number)
    _check_dtypes(arrays)
    try:
        program = _compiled(function, tuple(fixed), names)
    except TypeError as error:  # something that cannot be hashed
        raise _OnHostError from error
    return program(*_together(arrays))


_DYNAMIC = object()


@functools.lru_cache(maxsize=512)
def _compiled(function: Callable[..., Any], fixed: tuple[Any, ...], names: tuple[str, ...]) -> Any:
    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        values = [next(given) if value is _DYNAMIC else value for value in fixed]
        split = len(values) - len(names)
        return function(*values[:split], **dict(zip(names, values[split:], strict=True)))

    return jax.jit(run)


def _number(value: Any) -> Any:
    """A Python number, also of a plain tensor without dims; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.item() if type(value) is torch.Tensor and value.dim() == 0 else None
    return value if isinstance(value, bool | int | float) else None


def _check_dtypes(arrays: Sequence[Any]) -> None:
    """Arrays with dims decide the dtype; where they disagree torch's promotion is for the host."""
    if len({a.dtype for a in arrays if isinstance(a, jax.Array)}) > 1:
        raise _OnHostError


def _together(arrays: Sequence[Any]) -> list[Any]:
    """Scalars moved to the devices of the array that they meet."""
    on = [a for a in arrays if isinstance(a, jax.Array)]
    target = max(on, key=lambda a: a.ndim, default=None)
    if target is None or all(a.sharding == target.sharding for a in on):
        return list(arrays)
    sharding = target.sharding
    if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)):
        raise _OnHostError
    out = []
    for array in arrays:
        if isinstance(array, jax.Array) and array.sharding.device_set != sharding.device_set:
            if array.ndim:
                raise _OnHostError
            array = _moved(array, sharding.mesh)
        out.append(array)
    return out


_recently: dict[tuple[int, Any], tuple[jax.Array, jax.Array]] = {}


def _moved(scalar: jax.Array, mesh: Mesh) -> jax.Array:
    """A scalar on another sub-mesh; one that meets many arrays is moved once."""
    key = (id(scalar), mesh)
    found = _recently.get(key)
    if found is None or found[0] is not scalar:
        if len(_recently) > 64:
            _recently.clear()
        found = _recently[key] = (scalar, move([scalar], [None], mesh)[0])
    return found[1]


# --- operators of their own form ------------------------------------------------------------------


def _item(args: tuple[Any, ...], kwargs: dict[str, Any], of: StorageOf) -> Any:
    storage = of(args[0])
    assert storage is not None
    TRAFFIC.to_host += storage.array.nbytes
    return storage.array.item()


def _stack(args: tuple[Any, ...], kwargs: dict[str, Any], of: StorageOf) -> Storage:
    storages = [of(value) for value in args[0]]
    if any(s is None or s.shape for s in storages):
        raise _OnHostError
    arrays = [s.array for s in storages if s is not None]
    _check_dtypes(arrays)
    return _stored(_compiled(_stacked, (_DYNAMIC,) * len(arrays), ())(*_together(arrays)))


def _stacked(*arrays: Any) -> Any:
    return jnp.stack(arrays)


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], of: StorageOf) -> Storage:
    dtype, storage = kwargs.get("dtype"), of(args[0])
    wanted = {value: key for key, value in TORCH_DTYPES.items()}.get(dtype or args[0].dtype)
    device = kwargs.get("device")
    if storage is None or wanted is None or (device is not None and torch.device(device) != args[0].device):
        raise _OnHostError
    if not jnp.issubdtype(wanted, jnp.floating) or wanted.itemsize == 8:
        raise _OnHostError
    return _stored(_compiled(_as_dtype, (_DYNAMIC, wanted), ())(storage.array))


def _as_dtype(x: Any, dtype: Any) -> Any:
    return x.astype(dtype)


def _copy(args: tuple[Any, ...], kwargs: dict[str, Any], of: StorageOf) -> Any:
    target, source = of(args[0]), of(args[1])
    if target is None or tuple(args[1].shape) != target.shape:
        raise _OnHostError
    if source is not None:
        return _write(args[0], _overwritten, args[:2], {}, of)
    target.replace(jax.device_put(to_jax(args[1]).astype(target.array.dtype), target.array.sharding))
    TRAFFIC.to_device += target.array.nbytes
    return args[0]


def _overwritten(old: Any, new: Any) -> Any:
    return jnp.copy(new)


def _foreach(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], of: StorageOf) -> Any:
    """`_foreach_mul_.Tensor` and the like: the operator of each tensor."""
    base, _, overload = name.removeprefix("_foreach_").partition(".")
    writes = base.endswith("_")
    base = base.removesuffix("_")
    if base == "norm":
        return [_compute(_vector_norm, (x, *args[1:2]), {}, of) for x in args[0]]
    kinds = {"Scalar": "Scalar", "ScalarList": "Scalar", "List": "Tensor", "Tensor": "Tensor"}
    kind = kinds.get(overload, "default")
    if base == "zero":
        for x in args[0]:
            _fill((x,), {}, of)
        return None
    function = _MATHS.get(f"{base}.{kind}") or _MATHS.get(f"{base}.Tensor") or _MATHS.get(f"{base}.default")
    if function is None or any(of(x) is None for x in args[0]):
        raise _OnHostError
    results = []
    for position, first in enumerate(args[0]):
        rest = [a[position] if isinstance(a, list | tuple) else a for a in args[1:]]
        if writes:
            _write(first, function, (first, *rest), kwargs, of)
        else:
            results.append(_compute(function, (first, *rest), kwargs, of))
    return None if writes else results


def _fill(args: tuple[Any, ...], kwargs: dict[str, Any], of: StorageOf) -> Any:
    """`zero_` and `fill_`: made where the array lies, which is not read."""
    target, *given = args
    storage, value = of(target), _number(given[0]) if given else 0.0
    if storage is None or value is None:
        raise _OnHostError
    array = storage.array
    storage.replace(_filled(array.shape, array.dtype, array.sharding)(float(value)))
    return target


@functools.lru_cache(maxsize=512)
def _filled(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    return jax.jit(lambda value: jnp.full(shape, value, dtype), out_shardings=sharding)


def _unscale(args: tuple[Any, ...], kwargs: dict[str, Any], of: StorageOf) -> Any:
    """Gradients times the inverse scale; `found_inf`, a plain tensor, becomes 1 if one is not finite."""
    grads, found, scale = args
    by_place: dict[Any, list[Storage]] = {}
    for storage in map(of, grads):
        if storage is None:
            raise _OnHostError
        by_place.setdefault(frozenset(storage.array.sharding.device_set), []).append(storage)
    flags = []
    for storages in by_place.values():
        arrays, flag = _unscaled([storage.array for storage in storages], float(scale))
        flags.append(flag)
        for storage, array in zip(storages, arrays, strict=True):
            storage.replace(array)
    TRAFFIC.to_host += sum(flag.nbytes for flag in flags)
    if any(map(bool, flags)) and isinstance(found, torch.Tensor):
        found.fill_(1.0)


@jax.jit
def _unscaled(grads: list[jax.Array], scale: Any) -> tuple[list[jax.Array], jax.Array]:
    """One program for all gradients of a stage: the products, and whether a gradient is not finite."""
    finite = [jnp.isfinite(grad).all() for grad in grads]
    return [grad * scale for grad in grads], jnp.logical_not(jnp.stack(finite).all())


_SPECIAL: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense.default": _item,
    "stack.default": _stack,
    "_to_copy.default": _cast,
    "copy_.default": _copy,
    "zero_.default": _fill,
    "fill_.Scalar": _fill,
    "_amp_foreach_non_finite_check_and_unscale_.default": _unscale,
}
