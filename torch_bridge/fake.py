"""Modules without weights: their parameters and buffers as fake tensors while they are followed.

A module may be real, built under `torch.device("meta")`, or under a `FakeTensorMode`. To be followed, its
tensors are lent: each is replaced by a fake one on the CPU, the same for tied names, and put back after.
"""

import contextlib
from collections.abc import Iterator

import torch

from torch_bridge.tape import WritesNoted


@contextlib.contextmanager
def lent(module: torch.nn.Module, mode: WritesNoted) -> Iterator[dict[int, torch.Tensor]]:
    """Replace a module's parameters and buffers by fake ones of `mode`, and put them back, with all attributes.

    Yields:
        id of each tensor of the module -> the fake one in its place.
    """
    homes = [held for inner in module.modules() for held in (inner._parameters, inner._buffers) if held]
    found = [dict(held) for held in homes]
    attributes = [(inner.__dict__, dict(inner.__dict__)) for inner in module.modules()]
    twins: dict[int, torch.Tensor] = {}
    try:
        for held in homes:
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in twins:
                        twins[id(tensor)] = mode.twin(tensor)
                    held[name] = twins[id(tensor)]
        yield twins
    finally:
        for held, before in (*attributes, *zip(homes, found, strict=True)):
            held.clear()
            held.update(before)
