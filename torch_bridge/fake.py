"""Modules without weights: their parameters and buffers as fake tensors while they are followed.

A module may be real, built under `torch.device("meta")`, or under a `FakeTensorMode`. To be followed, its
tensors are lent: each is replaced by a fake one on the CPU, the same for tied names, and put back after.
"""

import contextlib
from collections.abc import Iterator

import torch

from torch_bridge.initialise import values_of
from torch_bridge.tape import WritesNoted

# Tensors of a module, each with its fake twin.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@contextlib.contextmanager
def lent(module: torch.nn.Module, mode: WritesNoted) -> Iterator[Pairs]:
    """Replace a module's parameters and buffers by fake ones of `mode`, and put all attributes back.

    A tensor that is a plain attribute keeps its values; a fake one gets those that torch computes.

    Yields:
        each tensor of the module with the fake one in its place.
    """
    homes = [held for inner in module.modules() for held in (inner._parameters, inner._buffers) if held]
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
                if isinstance(value, torch.Tensor):
                    inner.__dict__[name] = values_of(value, f"{type(inner).__name__}.{name}")
        yield list(twins.values())
    finally:
        for held, before in (*attributes, *zip(homes, found, strict=True)):
            held.clear()
            held.update(before)
