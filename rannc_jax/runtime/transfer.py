"""Move values between sub-meshes, any number of replicas to any other, without a host copy.

A sub-mesh is a 1-D `jax.sharding.Mesh` with the axis "data", one device a replica. A value lies on it
either with its batch rows spread over "data" (it has a `RowLayout`) or whole on every device (`None`).
`jax.device_put` between different device counts or specs goes through host memory and blocks, so here
it only ever copies one device's array to one device, or a sharded array to as many other devices:
source shards are sliced where they lie, all pieces of a call travel in one batched `device_put`, and
targets are joined where they arrive. Results never share memory with their sources unless the value
already lies as asked, in which case it is returned itself: callers may `.delete()` what they moved,
and must not donate it (donation across meshes is not safe).
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rannc_jax.ir.batch import RowLayout

DATA_AXIS = "data"
HOST_KIND = "pinned_host"
"""Memory of the host that devices copy from and to by themselves, as JAX calls it."""

PieceKey = tuple[int, int, int]  # value, position among the target's devices, number within that shard
Route = tuple[tuple["Piece", ...], ...]  # per target device, the pieces of its shard in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a value on its way: a range of one source shard, for one target shard.

    Args:
        source: position of the shard among the source's devices.
        start, stop: the range in the source shard, along the dim that carries the rows.
        whole: the range is all of the source shard.
        local: source and target shard are on one device.
    """

    source: int
    start: int
    stop: int
    whole: bool
    local: bool


@functools.cache
def sub_mesh_sharding(layout: RowLayout | None, target: Mesh) -> NamedSharding:
    """How a value lies on a sub-mesh: rows over "data", or replicated where it has none."""
    if layout is None:
        return NamedSharding(target, PartitionSpec())
    assert layout.contiguous, f"{layout}: a block of rows is not a block of the dim"
    return NamedSharding(target, PartitionSpec(*[None] * layout.dim, DATA_AXIS))


@functools.cache
def has_host_memory(target: Mesh) -> bool:
    """Whether the devices of a sub-mesh can keep values in `HOST_KIND` memory."""
    return all(
        HOST_KIND in {memory.kind for memory in device.addressable_memories()}
        for device in target.devices.flat
    )


def is_on_host(value: jax.Array) -> bool:
    """Whether a value lies in memory in which its devices do not compute."""
    return value.sharding.memory_kind not in (None, _own_kind(value.sharding))


def in_own_memory(sharding: Sharding) -> Sharding:
    """The same sharding in the memory in which the devices compute."""
    return sharding.with_memory_kind(_own_kind(sharding))


def _own_kind(sharding: Sharding) -> str:
    return next(iter(sharding.device_set)).default_memory().kind


def move(values: Sequence[jax.Array], layouts: Sequence[RowLayout | None], target: Mesh) -> list[jax.Array]:
    """Move values that lie on sub-meshes to another one.

    Args:
        values: arrays of any dtype (typed PRNG keys too), each on the devices of one sub-mesh; several
            sub-meshes may occur. A sharded value is sharded along its layout's dim only.
        layouts: where the rows of each value are; None for values to be whole on every device. The
            rows divide evenly by the number of replicas on both sides.
        target: the sub-mesh to move to; it may share devices with the sources.

    Returns:
        The values on `target`. All work is dispatched asynchronously.
    """
    parcel = _Parcel(values, target)
    for index, (value, layout) in enumerate(zip(values, layouts, strict=True)):
        if not value.sharding.is_equivalent_to(sub_mesh_sharding(layout, target), value.ndim):
            assert _is_on_sub_mesh(value, layout), f"{value.sharding} has no rows at {layout}"
            parcel.add(index, layout)
    return parcel.deliver()


def place(values: Sequence[Any], layouts: Sequence[RowLayout | None], target: Mesh) -> list[jax.Array]:
    """Put values from outside (host or device arrays, Python numbers) onto a sub-mesh.

    Unlike `move` this may read host memory, and the results never share memory with what was given: the
    runtime may donate or delete them, and the caller may overwrite or delete what is his.

    Args:
        values: numpy arrays, numbers, or `jax.Array`s that lie anywhere in this process.
        layouts: as in `move`.
        target: the sub-mesh.
    """
    parcel = _Parcel(values, target)
    strangers: list[int] = []
    for index, (value, layout) in enumerate(zip(values, layouts, strict=True)):
        if isinstance(value, jax.Array) and not is_on_host(value) and _is_on_sub_mesh(value, layout):
            parcel.add(index, layout)
        else:
            strangers.append(index)
    placed = parcel.deliver()
    if strangers:
        shardings = [sub_mesh_sharding(layouts[i], target) for i in strangers]
        detached = [detached_from(values[i], target) for i in strangers]
        for index, array in zip(strangers, jax.device_put(detached, shardings, may_alias=False), strict=True):
            placed[index] = array
    return placed


def settled(value: Any, mesh: Mesh, layout: RowLayout | None = None) -> Any:
    """A value as it shall lie on a sub-mesh: itself if it lies so, else a copy.

    Whole on part of the devices it is whole on already, the result shares its memory.
    """
    wanted = sub_mesh_sharding(layout, mesh)
    if not isinstance(value, jax.Array):
        return place([value], [layout], mesh)[0]
    if value.sharding is wanted or value.sharding.is_equivalent_to(wanted, value.ndim):
        return value
    if not value.is_fully_replicated or is_on_host(value):
        return place([value], [layout], mesh)[0]
    here = {shard.device: shard.data for shard in value.addressable_shards}
    if layout is None and set(mesh.devices.flat) <= set(here):
        pieces = [here[device] for device in mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(value.shape, wanted, pieces)
    return move([value], [layout], mesh)[0]


class _Parcel:
    """The pieces of one call: cut where they lie, sent together, joined where they arrive."""

    def __init__(self, values: Sequence[Any], target: Mesh) -> None:
        self.results: list[Any] = list(values)
        self.values = values
        self.target = target
        self.devices: list[jax.Device] = list(target.devices.flat)
        self.dims: dict[int, int] = {}
        self.shardings: dict[int, NamedSharding] = {}
        self.routes: dict[int, Route] = {}
        self.direct: list[int] = []

    def add(self, index: int, layout: RowLayout | None) -> None:
        """Have value `index` sent."""
        value, sharding = self.values[index], sub_mesh_sharding(layout, self.target)
        self.dims[index] = 0 if layout is None else layout.dim
        self.shardings[index] = sharding
        if _goes_one_to_one(value.sharding, sharding, value.shape):
            self.direct.append(index)
        else:
            rows_dim = None if layout is None else layout.dim
            self.routes[index] = _route(value.shape, rows_dim, value.sharding, sharding)

    def deliver(self) -> list[Any]:
        """All values, those that were added now on the target."""
        pieces = self._cut()
        self._send(pieces)
        self._join(pieces)
        return self.results

    def _cut(self) -> dict[PieceKey, jax.Array]:
        """The pieces where they lie, sliced by one program a source device."""
        pieces: dict[PieceKey, jax.Array] = {}
        cuts: dict[jax.Device, list[tuple[PieceKey, jax.Array, tuple[int, int, int]]]] = defaultdict(list)
        for index, route in self.routes.items():
            for position, parts in enumerate(route):
                for number, piece in enumerate(parts):
                    key, shard = (index, position, number), self.values[index].addressable_data(piece.source)
                    if piece.whole:
                        pieces[key] = shard
                    else:
                        (device,) = shard.sharding.device_set
                        cuts[device].append((key, shard, (self.dims[index], piece.start, piece.stop)))
        for work in cuts.values():
            keys, shards, ranges = zip(*work, strict=True)
            pieces.update(zip(keys, _slice_all(shards, ranges), strict=True))
        return pieces

    def _send(self, pieces: dict[PieceKey, jax.Array]) -> None:
        """One batched `device_put` for everything that must change devices or memory."""
        keys: list[PieceKey | int] = list(self.direct)
        arrays = [self.values[i] for i in self.direct]
        # The source's own spec: one that is only written differently would go through host memory.
        places: list[Any] = [NamedSharding(self.target, array.sharding.spec) for array in arrays]
        for key, array in pieces.items():
            index, position, number = key
            parts = self.routes[index][position]
            if parts[number].local and (not parts[number].whole or len(parts) > 1):
                continue  # there already, and in memory of its own (or will be when joined)
            keys.append(key)
            arrays.append(array)
            places.append(self.devices[position])
        if not arrays:
            return
        for key, array in zip(keys, jax.device_put(arrays, places, may_alias=False), strict=True):
            if isinstance(key, int):
                self.results[key] = array
            else:
                pieces[key] = array

    def _join(self, pieces: dict[PieceKey, jax.Array]) -> None:
        """Concatenate shards of several pieces, by one program a device, and assemble the values."""
        shards: dict[tuple[int, int], jax.Array] = {}
        joins: dict[int, list[tuple[int, list[jax.Array]]]] = defaultdict(list)
        for index, route in self.routes.items():
            for position, parts in enumerate(route):
                arrived = [pieces[index, position, number] for number in range(len(parts))]
                if len(arrived) == 1:
                    shards[index, position] = arrived[0]
                else:
                    joins[position].append((index, arrived))
        for position, work in joins.items():
            dims = tuple(self.dims[index] for index, _ in work)
            joined = _concatenate_all([arrived for _, arrived in work], dims)
            for (index, _), array in zip(work, joined, strict=True):
                shards[index, position] = array
        for index in self.routes:
            arrays = [shards[index, position] for position in range(len(self.devices))]
            self.results[index] = jax.make_array_from_single_device_arrays(
                self.values[index].shape, self.shardings[index], arrays
            )


@functools.partial(jax.jit, static_argnums=1)
def _slice_all(shards: Sequence[jax.Array], ranges: tuple[tuple[int, int, int], ...]) -> list[jax.Array]:
    return [
        jax.lax.slice_in_dim(shard, start, stop, axis=dim)
        for shard, (dim, start, stop) in zip(shards, ranges, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=1)
def _concatenate_all(groups: Sequence[Sequence[jax.Array]], dims: tuple[int, ...]) -> list[jax.Array]:
    return [jax.lax.concatenate(group, dim) for group, dim in zip(groups, dims, strict=True)]


@functools.cache
def _goes_one_to_one(source: Sharding, target: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether every shard has one counterpart elsewhere, so that one `device_put` copies them straight.

    Sub-meshes that share devices take the other way: there JAX would compile a program over both.
    """
    return (
        isinstance(source, NamedSharding)
        and source.mesh.axis_names == target.mesh.axis_names
        and source.device_set.isdisjoint(target.device_set)
        and list(source.devices_indices_map(shape).values())
        == list(target.devices_indices_map(shape).values())
    )


@functools.cache
def _route(shape: tuple[int, ...], dim: int | None, source: Sharding, target: NamedSharding) -> Route:
    """Cover every target shard with ranges of source shards.

    Of several devices that hold the same range, the target's own is taken, else they take turns.
    """
    holders: dict[tuple[int, int], list[tuple[int, jax.Device]]] = defaultdict(list)
    for number, (device, index) in enumerate(source.devices_indices_map(shape).items()):
        holders[_range(index, dim, shape)].append((number, device))
    route: list[tuple[Piece, ...]] = []
    for position, (device, index) in enumerate(target.devices_indices_map(shape).items()):
        first, last = _range(index, dim, shape)
        parts: list[Piece] = []
        for (low, high), copies in sorted(holders.items()):
            start, stop = max(first, low), min(last, high)
            if start < stop or (first == last and not parts):  # an empty shard is one empty piece
                number, local = next(
                    ((n, True) for n, holder in copies if holder == device),
                    (copies[position % len(copies)][0], False),
                )
                whole = (start, stop) == (low, high)
                parts.append(
                    Piece(source=number, start=start - low, stop=stop - low, whole=whole, local=local)
                )
        route.append(tuple(parts))
    return tuple(route)


def _range(index: tuple[slice, ...], dim: int | None, shape: tuple[int, ...]) -> tuple[int, int]:
    """What a shard holds along `dim`; without one everything is one range."""
    return (0, 1) if dim is None else index[dim].indices(shape[dim])[:2]


def _is_on_sub_mesh(value: jax.Array, layout: RowLayout | None) -> bool:
    """Whether only the dim of the rows, if any, is spread over devices."""
    shard = value.sharding.shard_shape(value.shape)
    dim = None if layout is None else layout.dim
    return all(
        part == size or d == dim for d, (part, size) in enumerate(zip(shard, value.shape, strict=True))
    )


def detached_from(value: Any, target: Mesh) -> Any:
    """What `device_put` may take over: on CPU devices it would alias a numpy array's memory, and arrays in
    host memory it would reshard by a program over two kinds of memory."""
    if isinstance(value, jax.Array):
        return np.array(value) if is_on_host(value) else value
    return np.array(value) if target.devices.flat[0].platform == "cpu" else value
