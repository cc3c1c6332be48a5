"""How the user calls the module, and the conversions that such calls need.

A conversion serves every batch size and length; another mode (train or eval of any submodule), another
structure of arguments, another fixed argument or autocast is another one. They are made of a *twin*: the
module without the memory of its parameters, which later become device tensors.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from jax.tree_util import keystr, tree_flatten_with_path

from torch_bridge.convert import convert
from torch_bridge.drop_in.device_tensor import DeviceTensor
from torch_bridge.inputs import flatten
from torch_bridge.module import JaxModule
from torch_bridge.structures import share_with_jax
from torch_bridge.tensors import to_jax

CALL = "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the module.

    Args:
        args, kwargs: as the user gave them.
        key: what calls that one conversion serves have in common.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Any


def call_of(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Describe a call."""
    share_with_jax([*args, *kwargs.values()])
    leaves, treedef = flatten((args, kwargs))
    kinds = tuple(
        ("tensor", leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else ("fixed", _hashable(leaf))
        for leaf in leaves
    )
    flags = tuple(m.training for m in module.modules())
    wants = tuple(p.requires_grad for p in module.parameters())
    return Call(args=args, kwargs=kwargs, key=(treedef, kinds, flags, wants, _autocast()))


def _hashable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return leaf


def _autocast() -> str | None:
    """The precision that torch's autocast asks for around the call."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return {torch.bfloat16: "bf16", torch.float16: "fp16"}[torch.get_autocast_dtype(device)]
    return None


def twin_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module with shapes in the place of its parameters; ties, buffers and attributes stay."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        shape = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(shape, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


@dataclass(slots=True)
class Conversions:
    """Conversions of a module, made when a call first needs them.

    Args:
        module: the user's; its modes are read at every call.
        twin: what is exported.
        precision: as in `convert`; autocast around a call comes before it.
    """

    module: torch.nn.Module
    twin: torch.nn.Module
    precision: str | None = None
    found: dict[Any, JaxModule] = field(default_factory=dict)

    def of(self, call: Call) -> JaxModule:
        """The conversion that serves a call."""
        if call.key not in self.found:
            self._follow()
            args, kwargs = jax.tree.map(_example, (call.args, call.kwargs), is_leaf=lambda x: x is None)
            precision = _autocast() or self.precision
            with torch.amp.autocast("cpu", enabled=False):
                self.found[call.key] = convert(self.twin, args, kwargs, precision=precision)
        return self.found[call.key]

    def _follow(self) -> None:
        """Give the twin the modes of the module, and whether its parameters want gradients."""
        for mine, its in zip(self.module.modules(), self.twin.modules(), strict=True):
            its.training = mine.training
        for mine, its in zip(self.module.parameters(), self.twin.parameters(), strict=True):
            its.requires_grad_(mine.requires_grad)


def batch_of(jm: JaxModule, call: Call) -> Any:
    """The arguments as the conversion's batch, on devices where they are already there."""
    inputs = jm.programs.wrapper.inputs
    return inputs.batch([_array(value) for value in inputs.bind(call.args, call.kwargs)])


def gradient_paths(jm: JaxModule, call: Call) -> list[tuple[str, torch.Tensor]]:
    """Batch leaves that want a gradient: pytree path, the user's tensor."""
    inputs = jm.programs.wrapper.inputs
    tensors = inputs.bind(call.args, call.kwargs)
    slots, _ = tree_flatten_with_path(inputs.batch(list(range(len(tensors)))))
    pairs = [(keystr(path), tensors[slot]) for path, slot in slots]
    return [(path, t) for path, t in pairs if isinstance(t, torch.Tensor) and t.requires_grad]


def _example(leaf: Any) -> Any:
    """A plain tensor for the export (its values do not matter) in the place of a device tensor."""
    if isinstance(leaf, DeviceTensor):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)
    return leaf


def _array(value: Any) -> Any:
    if value is None:
        return None
    return value.storage_.array if isinstance(value, DeviceTensor) else to_jax(value, what="an argument")
