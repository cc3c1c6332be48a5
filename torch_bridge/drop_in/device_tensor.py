"""`DeviceTensor`: a torch tensor whose values lie on JAX devices.

Operators of a training loop (norms, scaling, clipping, finiteness, accumulation) run where the values are;
any other operator gets the host copy of `Storage`, so everything works and only the rest costs a copy.
It is an ordinary wrapper subclass: no device, no backend and no global of torch is registered or changed.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_bridge.drop_in.operators import on_devices
from torch_bridge.drop_in.storage import Storage

Tensor = torch.Tensor


class DeviceTensor(torch.Tensor):
    """A tensor over a `Storage`; several tensors may share one, as `p`, `p.data` and `p.detach()` do."""

    storage_: Storage

    @staticmethod
    def __new__(cls, storage: Storage, *, device: Any = "cpu", requires_grad: bool = False) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls, storage.shape, dtype=storage.dtype, device=device, requires_grad=requires_grad
        )

    def __init__(self, storage: Storage, *, device: Any = "cpu", requires_grad: bool = False) -> None:
        self.storage_ = storage

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(plain(self))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PYTHON_SIDE:
                return _PYTHON_SIDE[func](args[0], *args[1:], **kwargs)
            if func in _VIEWS and not (torch.is_grad_enabled() and args[0].requires_grad):
                args, kwargs = pytree.tree_map(_host, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALIASES:
            return DeviceTensor(args[0].storage_, device=args[0].device)
        if func in _SHAPED_LIKE:
            return func(
                torch.empty(args[0].shape, dtype=args[0].dtype, device="meta"),
                *args[1:],
                **{**kwargs, "device": kwargs.get("device") or args[0].device},
            )
        found = on_devices(func, args, kwargs, _storage_of)
        if found is not NotImplemented:
            return _wrapped(found, args[0])
        host_args, host_kwargs = pytree.tree_map(_host, (args, kwargs))
        result = func(*host_args, **host_kwargs)
        return _same_objects(func, args, kwargs, result)


def plain(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the value, on the host; a parameter stays one."""
    if not isinstance(tensor, DeviceTensor):
        return tensor
    value = tensor.storage_.host.clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value


def _storage_of(value: Any) -> Storage | None:
    return value.storage_ if isinstance(value, DeviceTensor) else None


def _host(value: Any) -> Any:
    return value.storage_.host if isinstance(value, DeviceTensor) else value


def _wrapped(found: Any, like: Any) -> Any:
    """Results of `on_devices`: storages become tensors, an argument that was written is returned itself."""
    device = like.device if isinstance(like, torch.Tensor) else "cpu"

    def wrap(leaf: Any) -> Any:
        return DeviceTensor(leaf, device=device) if isinstance(leaf, Storage) else leaf

    return [wrap(leaf) for leaf in found] if isinstance(found, list) else wrap(found)


def _same_objects(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What an operator that writes its arguments returns: the arguments. Their host copies are newer now
    (below autograd torch does not count writes)."""
    schema = func._schema
    written = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for tensor in pytree.tree_leaves(written):
        if isinstance(tensor, DeviceTensor):
            tensor.storage_.host_is_newer()
    if not any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
        return result
    return written[0] if len(schema.returns) == 1 else tuple(written)


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    made = plain(tensor)
    made.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    memo[id(tensor)] = made
    return made


def _of_plain(name: str) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: getattr(plain(tensor).detach(), name)(*args, **kwargs)


# What reads memory from Python, without an operator that could be followed. They get copies.
_PYTHON_SIDE: dict[Any, Callable[..., Any]] = {
    getattr(Tensor, name): _of_plain(name)
    for name in ("numpy", "tolist", "__array__", "data_ptr", "untyped_storage", "storage", "share_memory_")
}
_PYTHON_SIDE[Tensor.__reduce_ex__] = lambda tensor, protocol: plain(tensor).__reduce_ex__(protocol)
_PYTHON_SIDE[Tensor.__deepcopy__] = _deepcopy

# Their results share memory with the tensor: they are taken of the host copy, above autograd, where torch
# counts writes to all views of a tensor.
_VIEWS = {
    getattr(Tensor, name)
    for name in (
        *("__getitem__", "__setitem__", "view", "view_as", "reshape", "flatten", "ravel", "t", "transpose"),
        *("permute", "unsqueeze", "squeeze", "select", "narrow", "expand", "expand_as", "unbind", "split"),
        *("chunk", "tensor_split", "diagonal", "swapaxes", "swapdims", "movedim", "moveaxis", "as_strided"),
        *("unfold", "unflatten", "index_put_", "__iter__"),
    )
} | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
_SHAPED_LIKE = {
    getattr(_aten, name).default
    for name in ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
}
_SHAPED_LIKE |= {getattr(_aten, name).default for name in ("new_zeros", "new_ones", "new_empty", "new_full")}
