"""Values between files, torch and converted modules: state dicts and safetensors, exact both ways.

safetensors are read and written tensor by tensor: the host never holds more than one. A tensor that is
laid over several devices is read slice by slice, each for its device. The file format is that of
https://huggingface.co/docs/safetensors (eight bytes of header length, a JSON header, the data); several
files come with the index that Hugging Face models have.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from torch_bridge.errors import BridgeError, message
from torch_bridge.signature import Names
from torch_bridge.tensors import to_jax, to_torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What Hugging Face writes into one file by default.
SHARD_BYTES = 5 * 10**9
_CODES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


class Reader:
    """Tensors of one safetensors file, or of all files of an index, by name.

    Args:
        path: a file, an index, or a directory that holds either under Hugging Face's name.
    """

    def __init__(self, path: str | Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for file in _files(Path(path)):
            opened = self._stack.enter_context(_open(file))
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def whole(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def placed(self, name: str, like: Any, sharding: Any) -> jax.Array:
        """A tensor as an array with the dtype of `like`, each device's part read for that device.

        Raises:
            BridgeError: an integer does not fit.
        """
        source = self._files[name].get_slice(name)
        parts: dict[Any, np.ndarray] = {}

        def part(index: Any) -> np.ndarray:
            key = tuple((s.start, s.stop) for s in index)
            if key not in parts:
                tensor = source[index] if index else self.whole(name)
                parts[key] = np.asarray(to_jax(tensor, what=name)).astype(like.dtype, copy=False)
            return parts[key]

        if sharding is None:
            return jax.device_put(part(tuple(slice(None) for _ in like.shape)))
        return jax.make_array_from_callback(tuple(like.shape), sharding, part)

    def in_place_of(self, name: str, held: Any) -> Any:
        """A tensor where a leaf of a train state lies, which may be slices on the devices of several stages.

        Raises:
            BridgeError: an integer does not fit.
        """
        if isinstance(held, jax.Array):
            return self.placed(name, held, held.sharding)
        whole = np.asarray(to_jax(self.whole(name), what=name)).astype(held.dtype, copy=False)
        return held.with_values(whole)


def _open(file: Path) -> Any:
    from safetensors import safe_open  # optional

    return safe_open(str(file), framework="pt")


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        path = path / INDEX if (path / INDEX).exists() else path / SINGLE
    if not path.exists():
        raise BridgeError(
            message(
                f"there is no {path}.",
                hint=f"a .safetensors file, an index ({INDEX}), or a directory with one of them",
            )
        )
    if path.suffix == ".json":
        where = json.loads(path.read_text())["weight_map"]
        yield from (path.parent / name for name in dict.fromkeys(where.values()))
    else:
        yield path


def sources(given: Mapping[str, tuple[int, ...]], names: Names, prefix: str) -> dict[str, str]:
    """Which given tensor each of a module's own tensors is read from: owner name -> given name.

    Tied names stand for each other. A model with a head reads the file of its base model and the other way
    round: `prefix` (Hugging Face's base_model_prefix) may be missing or too many.

    Args:
        given: name -> shape.
        names: the module's.
        prefix: "" if there is none.

    Raises:
        BridgeError: for missing names, unknown names and shapes that differ, all in one message.
    """
    own = {**names.params, **names.frozen, **names.buffers}
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in given:
        owner = next((o for o in (names.owner(n) for n in _spellings(name, prefix)) if o in own), None)
        if owner is None:
            unknown.append(name)
        else:
            found.setdefault(owner, name)
    expected = {names.owner(name) for name in names.saved}
    problems = [f"missing: {name}" for name in sorted(expected - found.keys())]
    problems += [f"unknown: {name}" for name in sorted(unknown)]
    problems += [
        f"shape of {owner}: got {given[name]}, expected {tuple(own[owner].shape)}"
        for owner, name in sorted(found.items())
        if given[name] != tuple(own[owner].shape)
    ]
    if problems:
        raise BridgeError(message("the values do not belong to this module.", *problems))
    return found


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    return (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if prefix else (name,)


def saved_values(names: Names, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, torch.dtype]]:
    """(name, value, torch dtype) of everything that a state_dict holds, in its order, tied tensors once.

    Args:
        names: the module's.
        values: by owner name.
    """
    tensors = {**names.params, **names.frozen, **names.buffers}
    seen: set[str] = set()
    for name in names.saved:
        owner = names.owner(name)
        if owner not in seen:
            seen.add(owner)
            yield name, values[owner], tensors[owner].dtype


def check_have_values(values: Mapping[str, Any]) -> None:
    """Refuse shapes where values are needed."""
    shapes = [name for name, value in values.items() if isinstance(value, jax.ShapeDtypeStruct)]
    if shapes:
        more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
        raise BridgeError(
            message(
                f"{', '.join(shapes[:3])}{more}: only the shape is known.",
                hint="give a train state, or values from init, from_state_dict or load_safetensors",
            )
        )


def write(
    path: str | Path, entries: Sequence[tuple[str, Any, torch.dtype]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors into one file (a path that ends with .safetensors), or into a directory as Hugging Face
    does: one file, or several with an index."""
    path = Path(path)
    if path.suffix == ".safetensors":
        _write_file(path, entries)
        return
    path.mkdir(parents=True, exist_ok=True)
    shards = _shards(entries, shard_bytes)
    for old in (path / INDEX, path / SINGLE):
        old.unlink(missing_ok=True)
    if len(shards) == 1:
        _write_file(path / SINGLE, shards[0])
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(path / file, shard)
        where.update((name, file) for name, _, _ in shard)
    total = sum(_num_bytes(value, dtype) for _, value, dtype in entries)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(entries: Sequence[Any], limit: int) -> list[list[Any]]:
    shards: list[list[Any]] = [[]]
    size = 0
    for entry in entries:
        here = _num_bytes(entry[1], entry[2])
        if shards[-1] and size + here > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += here
    return shards


def _num_bytes(value: Any, dtype: torch.dtype) -> int:
    return math.prod(value.shape) * dtype.itemsize


def _write_file(path: Path, entries: Sequence[tuple[str, Any, torch.dtype]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value, dtype in entries:
        if dtype not in _CODES:
            raise BridgeError(message(f"safetensors cannot hold {name}, which is {dtype}."))
        end = offset + _num_bytes(value, dtype)
        header[name] = {"dtype": _CODES[dtype], "shape": list(value.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, value, dtype in entries:
            tensor = to_torch(value, dtype=dtype).contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def filled(
    parts: Mapping[str, Any], found: Mapping[str, str], read: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """Values in the place of what is held, where there are any."""
    return {name: read(found[name], held) if name in found else held for name, held in parts.items()}


def as_held(tensor: torch.Tensor, held: Any, name: str) -> jax.Array:
    """A torch tensor as an array of the dtype that is held for it."""
    array = to_jax(tensor, what=name)
    return array if array.dtype == held.dtype else array.astype(held.dtype)
