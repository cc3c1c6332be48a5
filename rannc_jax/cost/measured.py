"""Measured costs: structurally distinct blocks, compiled and timed on the device that is here.

A `MeasuredTable` is a `CostTable` around the analytic one. Bytes stay analytic; seconds are the analytic
ones times what measurements say of them: forward and backward of one representative of each distinct
block, at a few numbers of rows, under each remat. Between those rows the ratio follows the logarithm of
the rows; on other kinds of device than the one here it is kept.

Unlike the rest of this room it touches a device, so nothing imports it until it is asked for. Equal
blocks are found by their text (`fingerprint`), and measurements are kept on disk (`cache`).
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rannc_jax.cluster import ClusterSpec, DeviceSpec
from rannc_jax.contract import Remat
from rannc_jax.cost.cache import Cache
from rannc_jax.cost.fingerprint import program_text
from rannc_jax.cost.table import BlockCost, BlockValue, CostTable, Priced, TiedState
from rannc_jax.cost.timing import Clock, attempt
from rannc_jax.errors import CostError
from rannc_jax.ir.align import Aligned
from rannc_jax.ir.autodiff import Differentiated, differentiate, stage_function
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.slice import as_function, avals, blocks_of, slice_nodes
from rannc_jax.progress import NoProgress, Progress

FORWARD = "forward"
PROGRAM_S = 0.5
"""Seconds spent on timing one program after it is compiled."""

Ratios = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What blocks are measured with.

    Args:
        graph: of the function.
        blocks: node indices of each block.
        trace_at: the function traced at a number of rows.
        rows: numbers of rows to measure at, ascending.
        cluster: its first device is taken to be of the kind that is here.
    """

    graph: Graph
    blocks: Sequence[Sequence[int]]
    trace_at: Callable[[int], Aligned]
    rows: tuple[int, ...]
    cluster: ClusterSpec


class MeasuredTable:
    """A cost table whose seconds are corrected by measurements; make it with `measure`.

    Args:
        table: the analytic one.
        reference: the kind of device that was measured.
        ratios: per block, rows -> measured over analytic seconds of "forward" and of each remat's backward.
    """

    def __init__(
        self, table: CostTable, reference: DeviceSpec, ratios: Sequence[Mapping[int, Ratios]]
    ) -> None:
        self._table, self._reference, self._ratios = table, reference, ratios

    @property
    def blocks(self) -> tuple[BlockCost, ...]:
        return self._table.blocks

    @property
    def values(self) -> tuple[BlockValue, ...]:
        return self._table.values

    @property
    def ties(self) -> tuple[TiedState, ...]:
        return self._table.ties

    def price(self, block: int, rows: int, device: DeviceSpec) -> Priced:
        """Price a block; see `CostTable`."""
        priced = self._table.price(block, rows, device)
        found = self._ratios[block]
        if not found or device.platform != self._reference.platform:
            return priced
        at = functools.partial(_between, found, rows)
        return replace(
            priced,
            forward_s=priced.forward_s * at(FORWARD),
            backward_s={remat: s * at(remat.name) for remat, s in priced.backward_s.items()},
            weight_s=priced.weight_s * at(Remat.SAVE_ALL.name),
        )


def sample_rows(batch_rows: int, num_devices: int, num_microbatches: int | None) -> tuple[int, ...]:
    """Rows of a microbatch on one replica to measure at: the least and most that are likely, and between."""
    most = max(1, batch_rows // (num_microbatches or 2))
    least = max(1, batch_rows // ((num_microbatches or 4) * num_devices))
    return tuple(sorted({least, max(1, round(math.sqrt(least * most))), most}))


def measure(
    table: CostTable, site: Site, *, progress: Progress | None = None, cache: Cache | None = None
) -> MeasuredTable:
    """Measure every distinct block of a table, or take what was measured before.

    Args:
        table: the analytic table of `site.blocks`.
        site: see `Site`.
        progress: told about each distinct block.
        cache: on disk by default.

    Warns:
        UserWarning: once, where blocks could not be run; they keep their analytic seconds.
    """
    reference, here = site.cluster.device(0), jax.devices()[0]
    if here.platform != reference.platform:
        warnings.warn(
            f"costs are to be measured for {reference.kind} ({reference.platform}), but the devices here are "
            f"{here.platform}: analytic costs are used.",
            stacklevel=4,
        )
        return MeasuredTable(table, reference, [{} for _ in site.blocks])
    return _Measurer(table, site, here, progress or NoProgress(), cache or Cache()).run()


class _Measurer:
    def __init__(
        self, table: CostTable, site: Site, here: jax.Device, progress: Progress, cache: Cache
    ) -> None:
        self.table, self.site, self.here = table, site, here
        self.progress, self.cache = progress, cache
        self.seen: dict[str, Mapping[str, float] | None] = {}
        self.failed: dict[int, str] = {}

    def run(self) -> MeasuredTable:
        reference = self.site.cluster.device(0)
        ratios: list[dict[int, Ratios]] = [{} for _ in self.site.blocks]
        for rows in self.site.rows:
            trace = self.site.trace_at(rows)
            for index, nodes in enumerate(self.site.blocks):
                seconds = self._seconds(index, _Block(self.site.graph, nodes, trace))
                if seconds is not None:
                    ratios[index][rows] = _ratios(seconds, self.table.price(index, rows, reference))
        if self.failed:
            names = ", ".join(self.table.blocks[b].path or f"block {b}" for b in sorted(self.failed))
            warnings.warn(
                f"{len(self.failed)} blocks cannot be measured here and keep analytic costs: {names} "
                f"({next(iter(self.failed.values()))}).",
                stacklevel=6,
            )
        return MeasuredTable(self.table, reference, ratios)

    def _seconds(self, index: int, block: "_Block") -> Mapping[str, float] | None:
        """Seconds of a block's programs: seen before, kept on disk, or measured now."""
        key = Cache.key(block.text(), self.here.platform, self.here.device_kind, jax.__version__)
        if key not in self.seen:
            self.seen[key] = found = self.cache.read(key) or self._measured(index, block)
            if found is not None:
                self.cache.write(key, found)
        if self.seen[key] is None:
            self.failed.setdefault(index, "an equal block failed")
        return self.seen[key]

    def _measured(self, index: int, block: "_Block") -> Mapping[str, float] | None:
        path = self.table.blocks[index].path or f"block {index}"
        self.progress.note(f"measuring {path} at {block.rows} rows")
        try:
            return attempt(block.seconds, path)
        except CostError as error:
            self.failed[index] = str(error).splitlines()[-1].strip()
            return None


class _Block:
    """One block at one number of rows, as programs."""

    def __init__(self, graph: Graph, nodes: Sequence[int], trace: Aligned) -> None:
        inside = set(nodes)
        results = [k for k, node in enumerate(graph.outputs) if node in inside]
        part = slice_nodes(graph, nodes, results)
        self.program, self.rows = trace.program, trace.program.rows
        self.part = trace.slice(part)
        self.body = [trace.slice(block) for block in blocks_of(graph, part, [nodes])]
        self.given = avals(self.program, self.part.inputs)
        self.wrt = [i for i, v in enumerate(part.inputs) if v in graph.flows]
        ids = graph.program.output_ids()
        made = [*part.outputs, *(ids[k] for k in part.results)]
        self.cotangents = [i for i, v in enumerate(made) if v in graph.flows]

    def text(self) -> str:
        """Equal for blocks with equal programs."""
        closed = jax.make_jaxpr(as_function(self.program, self.part))(self.given)
        return f"{program_text(closed)}\n{self.wrt} {self.cotangents}"

    def seconds(self) -> dict[str, float]:
        """Seconds of a forward, and of a backward under each remat.

        What a forward takes longer for keeping more counts with the backward that wants it.
        """
        arrays = [_array(x, seed) for seed, x in enumerate(self.given)]
        plain = jax.jit(as_function(self.program, self.part))
        found = {FORWARD: Clock(PROGRAM_S).seconds(lambda: plain(arrays), most_s=PROGRAM_S)}
        if self.wrt and self.cotangents:
            for remat in Remat:
                run = stage_function(self.program, self.part, self.body, remat)
                diff = differentiate(run, self.given, wrt=self.wrt, cotangents=self.cotangents)
                forward_s, backward_s = _differentiated_seconds(diff, arrays)
                found[remat.name] = backward_s + max(0.0, forward_s - found[FORWARD])
        return found


def _differentiated_seconds(diff: Differentiated, arrays: Sequence[Any]) -> tuple[float, float]:
    """Seconds of the forward that keeps what its backward wants, and of that backward with its sums."""
    forward = jax.jit(diff.forward)
    forward_s = Clock(PROGRAM_S).seconds(lambda: forward(arrays), most_s=PROGRAM_S)
    outs, residuals = forward(arrays)
    held = [arrays[i] for i in diff.held]
    kept = [outs[k] for k in diff.kept_outputs]
    cotangents = [jnp.ones_like(outs[k]) for k in diff.cotangents]
    sums = [jnp.zeros(arrays[i].shape, jnp.promote_types(arrays[i].dtype, jnp.float32)) for i in diff.wrt]

    @jax.jit
    def backward(held: Any, kept: Any, residuals: Any, cotangents: Any, sums: Any) -> Any:
        grads = diff.backward(held, kept, residuals, cotangents)
        return [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]

    call = functools.partial(backward, held, kept, residuals, cotangents, sums)
    return forward_s, Clock(PROGRAM_S).seconds(call, most_s=PROGRAM_S)


def _array(shape: jax.ShapeDtypeStruct, seed: int) -> Any:
    """Something to compute with: small numbers, the first row of every table, keys."""
    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(seed), shape.shape) if shape.shape else jax.random.key(seed)
    if jnp.issubdtype(shape.dtype, jnp.floating):
        draw = np.random.default_rng(seed).uniform(0.01, 0.1, shape.shape)
        return jnp.asarray(draw, shape.dtype)
    return jnp.zeros(shape.shape, shape.dtype)


def _ratios(seconds: Mapping[str, float], priced: Priced) -> Ratios:
    analytic = {FORWARD: priced.forward_s, **{remat.name: s for remat, s in priced.backward_s.items()}}
    return {name: s / analytic[name] for name, s in seconds.items() if analytic.get(name, 0) > 0}


def _between(found: Mapping[int, Ratios], rows: int, name: str) -> float:
    """The ratio at some rows: by their logarithm between measurements, constant beyond, 1 if unknown."""
    points = [(math.log(r), ratios[name]) for r, ratios in sorted(found.items()) if name in ratios]
    if not points:
        return 1.0
    return float(np.interp(math.log(rows), [x for x, _ in points], [y for _, y in points]))
