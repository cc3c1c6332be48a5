"""Frozen dataclasses to JSON and back, led by their type hints alone.

Encoding and decoding are inverses for dataclasses of: str, int, float, bool, enums (by value), tuples
(`tuple[X, ...]` and fixed ones), string-keyed mappings, and other such dataclasses. Decoding trusts
nothing: every mistake is noted with its key path, and nothing is built from a wrong part.
"""

import dataclasses
import enum
import operator
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from rannc_jax.errors import RanncError
from rannc_jax.mistakes import Mistakes, nearest, one_of, shown

# What a wrong part decodes to; never leaves this file.
_WRONG = object()


def encode(value: Any) -> Any:
    """A dataclass as JSON data: dicts, lists, strings, numbers."""
    return _encode(type(value), value)


def decode(cls: type, data: Any, mistakes: Mistakes) -> Any:
    """Build `cls` from JSON data; None, with the reasons noted in `mistakes`, if it cannot be."""
    built = _decode(cls, data, "", mistakes)
    return None if built is _WRONG else built


def _encode(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return {name: _encode(hints[name], getattr(value, name)) for name in _field_names(hint)}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return [_encode(item, part) for item, part in zip(_items(arguments, len(value)), value, strict=True)]
    if origin is Mapping:
        return {str(key): _encode(arguments[1], part) for key, part in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value.value
    # numpy's scalars become Python's; operator.index refuses anything that is not a whole number
    return operator.index(value) if hint is int else hint(value)


def _decode(hint: Any, data: Any, path: str, mistakes: Mistakes) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), data, path, mistakes)
    if origin is tuple:
        return _decode_tuple(arguments, data, path, mistakes)
    if origin is Mapping:
        return _decode_mapping(arguments[1], data, path, mistakes)
    if issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        if data in values:
            return hint(data)
        mistakes.add(path, f"got {shown(data)}, expected {one_of(values)}{nearest(data, values)}")
        return _WRONG
    return _decode_scalar(hint, data, path, mistakes)


def _decode_dataclass(cls: type, data: Any, path: str, mistakes: Mistakes) -> Any:
    if not isinstance(data, Mapping):
        mistakes.add(path, f"got {shown(data)}, expected a table")
        return _WRONG
    hints, names = typing.get_type_hints(cls), _field_names(cls)
    for key in data:
        if key not in names:
            mistakes.add(_join(path, key), f"unknown key{nearest(key, names)}")
    parts: dict[str, Any] = {}
    for name in names:
        if name in data:
            parts[name] = _decode(hints[name], data[name], _join(path, name), mistakes)
        else:
            mistakes.add(_join(path, name), "missing")
            parts[name] = _WRONG
    if any(part is _WRONG for part in parts.values()):
        return _WRONG
    try:
        return cls(**parts)
    except RanncError as error:
        mistakes.add(path, str(error))
        return _WRONG


def _decode_tuple(arguments: tuple[Any, ...], data: Any, path: str, mistakes: Mistakes) -> Any:
    if not isinstance(data, list):
        mistakes.add(path, f"got {shown(data)}, expected a list")
        return _WRONG
    if arguments[-1] is not ... and len(data) != len(arguments):
        mistakes.add(path, f"got {shown(data)}, expected a list of {len(arguments)}")
        return _WRONG
    items = zip(_items(arguments, len(data)), data, strict=True)
    parts = [_decode(item, part, f"{path}[{i}]", mistakes) for i, (item, part) in enumerate(items)]
    return _WRONG if any(part is _WRONG for part in parts) else tuple(parts)


def _decode_mapping(hint: Any, data: Any, path: str, mistakes: Mistakes) -> Any:
    if not isinstance(data, Mapping):
        mistakes.add(path, f"got {shown(data)}, expected a table")
        return _WRONG
    parts = {key: _decode(hint, part, _join(path, key), mistakes) for key, part in data.items()}
    return _WRONG if any(part is _WRONG for part in parts.values()) else parts


_EXPECTED = types.MappingProxyType(
    {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}
)


def _decode_scalar(hint: Any, data: Any, path: str, mistakes: Mistakes) -> Any:
    accepted = (int, float) if hint is float else hint
    good = isinstance(data, accepted) and (hint is bool or not isinstance(data, bool))
    if not good or (hint is float and not abs(data) <= sys.float_info.max):
        mistakes.add(path, f"got {shown(data)}, expected {_EXPECTED[hint]}")
        return _WRONG
    return hint(data)


def _field_names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _items(arguments: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """The hint of every item of a tuple of this length."""
    return (arguments[0],) * length if arguments[-1] is ... else arguments


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
