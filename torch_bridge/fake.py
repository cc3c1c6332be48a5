"""Modules without weights: their parameters and buffers as fake tensors while they are followed.

A module may be real, built under `torch.device("meta")`, or under a `FakeTensorMode`. To be followed, its
tensors are lent: each is replaced by a fake one on the CPU, the same for tied names, and put back after.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


class Lending(FakeTensorMode):
    """A fake mode that makes twins of other tensors; real ones may be used beside its own."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor on the CPU like `tensor`, which may be real, meta or fake."""
        with self, torch.no_grad():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_() if tensor.requires_grad and tensor.is_leaf else made


# Tensors of a module, each with its fake twin.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@contextlib.contextmanager
def lent(
    module: torch.nn.Module, mode: Lending, concrete: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[Pairs]:
    """Replace a module's parameters and buffers by fake ones, and put all its attributes back after.

    Args:
        module: with real, meta or fake tensors.
        mode: where the fake ones live.
        concrete: gives tensors that are plain attributes their values.

    Yields:
        each tensor of the module with the fake one in its place.
    """
    homes: list[Any] = [held for inner in module.modules() for held in (inner._parameters, inner._buffers)]
    found = [dict(held) for held in homes]
    attributes = [(inner.__dict__, dict(inner.__dict__)) for inner in module.modules()]
    twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        for held in homes:
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in twins:
                        twins[id(tensor)] = tensor, mode.twin(tensor)
                    held[name] = twins[id(tensor)][1]
        for inner in module.modules():
            for name, value in list(inner.__dict__.items()):
                inner.__dict__[name] = _lent_attribute(value, twins, concrete)
        yield list(twins.values())
    finally:
        for held, before in (*attributes, *zip(homes, found, strict=True)):
            held.clear()
            held.update(before)


def _lent_attribute(
    value: Any,
    twins: dict[int, tuple[torch.Tensor, torch.Tensor]],
    concrete: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Any:
    """A plain attribute: tensors that the module also registers are lent (recurrent layers list theirs)."""
    if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_lent_attribute(item, twins, concrete) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) in twins:
        return twins[id(value)][1]
    return value if concrete is None else concrete(value)
