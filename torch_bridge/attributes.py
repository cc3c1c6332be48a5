"""What forward does to the attributes of its modules, beside computing.

A buffer that is assigned (`self.mean = ...`) is written, as if by `copy_`; torch.export would drop that.
Parameters must stay. Other attributes are Python's: a converted module keeps them as they were.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_bridge.errors import BridgeError, message
from torch_bridge.signature import PREFIX

_NUMBERS = (int, float)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_ABSENT = object()


@contextlib.contextmanager
def watched_attributes(root: nn.Module) -> Iterator[None]:
    """Run forward inside; then assigned buffers are written, and every module is as it was.

    Raises:
        BridgeError: for parameters that forward assigns, and buffers that change shape or dtype.
    """
    modules = _plain_modules(root)
    before = {name: (dict(m._buffers), dict(m._parameters), _numbers(m)) for name, m in modules.items()}
    yield
    for name, module in modules.items():
        buffers, parameters, numbers = before[name]
        _check_parameters(name, module, parameters)
        _write_buffers(name, module, buffers)
        changed = [key for key, value in _numbers(module).items() if numbers.get(key, value) != value]
        if changed:
            _warn(f"forward changes {', '.join(_path(name, key) for key in changed)}", "keeps the old values")


@contextlib.contextmanager
def unchanged(root: nn.Module) -> Iterator[None]:
    """Undo what forward does to hooks and Python attributes, both or neither.

    Code that installs hooks in its first forward notes so in an attribute: hooks that stay while the note is
    lost would be installed once more in every forward, and would be left behind on the user's module.
    """
    before = [
        (m, dict(vars(m)), {key: dict(getattr(m, key)) for key in _HOOKS})
        for m in _plain_modules(root).values()
    ]
    try:
        yield
    finally:
        for module, attributes, hooks in before:
            for key, value in list(vars(module).items()):
                if not isinstance(value, torch.Tensor) and attributes.get(key, _ABSENT) is not value:
                    if key in attributes:
                        vars(module)[key] = attributes[key]
                    else:
                        del vars(module)[key]
            for key, kept in hooks.items():
                getattr(module, key).clear()
                getattr(module, key).update(kept)


def recomputes_attributes(root: nn.Module) -> bool:
    """Whether weights are plain attributes that hooks compute before each forward (weight_norm, pruning)."""
    hooks = [hook for module in root.modules() for hook in module._forward_pre_hooks.values()]
    return any(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks)


def _plain_modules(root: nn.Module) -> dict[str, nn.Module]:
    """All but scripted ones, whose attributes are not Python's."""
    return {name: m for name, m in root.named_modules() if not isinstance(m, torch.jit.ScriptModule)}


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if type(value) in _NUMBERS}


def _check_parameters(name: str, module: nn.Module, before: Mapping[str, Any]) -> None:
    changed = [key for key, value in module._parameters.items() if before.get(key) is not value]
    if changed:
        raise BridgeError(
            message(
                f"forward assigns {', '.join(_path(name, key) for key in changed)}, a parameter.",
                hint="compute with the new value without storing it, or store it in a buffer",
            )
        )


def _write_buffers(name: str, module: nn.Module, before: Mapping[str, Any]) -> None:
    for key, value in list(module._buffers.items()):
        old = before.get(key)
        if value is old:
            continue
        if old is None:
            _warn(f"forward makes the buffer {_path(name, key)}", "computes it anew in every call")
        elif value is not None:
            _write(_path(name, key), old, value)
    module._buffers.clear()
    module._buffers.update(before)


def _write(path: str, old: torch.Tensor, value: torch.Tensor) -> None:
    if old.shape != value.shape or old.dtype != value.dtype:
        raise BridgeError(
            message(
                f"forward assigns the buffer {path} a tensor of another shape or dtype.",
                f"got: {value.dtype} {tuple(value.shape)}; had: {old.dtype} {tuple(old.shape)}",
                hint="register it with the shape and dtype that it will have",
            )
        )
    with torch.no_grad():
        old.copy_(value)


def _warn(what: str, instead: str) -> None:
    warnings.warn(f"{what}; the converted module {instead}.", UserWarning, stacklevel=2)


def _path(module: str, key: str) -> str:
    return f"{module}.{key}".removeprefix(".").removeprefix(PREFIX)
