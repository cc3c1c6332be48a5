"""The block level: coarsen thousands of atoms into a few balanced, convex blocks.

Two steps. *Coarsen*: rounds in which the lightest clusters merge with the neighbour that gives the
lightest result, closest module and heaviest traffic first, under the balance cap mean + 2 sigma
(RaNNC, Tanaka et al., IPDPS 2021, 3.2). Clusters always stand in one topological order, and only
merges that keep it are considered, so no path can leave a cluster and come back. *Arrange*: the few
hundred clusters left are cut into at most `max_blocks` runs by dynamic programming that weighs
balance against the bytes and modules a boundary cuts through.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rannc_jax.errors import PlanError
from rannc_jax.ir.paths import common_path, holds, shared_depth
from rannc_jax.partition.atomic import Atoms
from rannc_jax.partition.rules import unknown_module

FINE = 12
"""Coarsening stops below this many clusters per block; a last round leaves at least about half as many."""

NEGLIGIBLE = 0.05
"""A cluster lighter than this share of a fine cluster may merge over the cap, up to one share for each
cluster that takes them in: it cannot unbalance anything."""

MODULE_COST = 2.0
"""Cost of cutting inside a module that a block could hold whole; it falls as the module outgrows the
mean block. Balance costs (weight / mean)^2 a block: splitting a block of weight 1.33 (24 layers in 32
blocks) gains at most 0.9, which must not part a layer; one of weight 2.7 gains 3.6, which may."""

SECONDS_PER_BYTE = 1 / 100e9
"""Weight of boundary bytes against work where the caller knows no link: between PCIe and NVLink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBlock:
    """A convex set of nodes.

    Args:
        path: deepest module path that holds all of its nodes that have one.
        nodes: node indices, ascending.
    """

    path: str
    nodes: tuple[int, ...]


def coarsen(
    atoms: Atoms,
    *,
    max_blocks: int = 32,
    cuts: Sequence[str] = (),
    modules: Sequence[tuple[str, str]] = (),
    seconds_per_byte: float = SECONDS_PER_BYTE,
) -> tuple[NodeBlock, ...]:
    """Group atoms into blocks, in a topological order.

    Args:
        atoms: the weighted DAG.
        max_blocks: upper limit; fewer come out where the program has fewer pieces worth separating, more
            only where `cuts` names more.
        cuts: module names; a block begins at the first atom inside each.
        modules: (constraint, module that it names); a block begins at the first atom inside each and after
            the last.
        seconds_per_byte: what a byte across a boundary costs.

    Raises:
        PlanError: no atom lies in a named module.

    Complexity: O(n log n) for bounded degree, plus O(max_blocks^3) for the arrangement.
    """
    if not atoms.seconds:
        return ()
    starts = named_starts(atoms.paths, cuts, modules)
    clusters = _Clusters(atoms, starts, seconds_per_byte)
    fine = max(FINE * max_blocks, len(starts) + 1)
    clusters.coarsen(fine)
    order = list(clusters.order())
    segments = [clusters.segment[c] for c in order]
    nodes_of = [clusters.nodes[c] for c in order]
    weights = np.asarray([clusters.weight[c] for c in order])
    mean = float(weights.sum()) / max_blocks or 1.0
    costs = _traffic(atoms, nodes_of) * seconds_per_byte / mean
    costs += MODULE_COST * _parted(atoms, nodes_of, weights, mean)
    forced = [i for i in range(1, len(order)) if segments[i] != segments[i - 1]]
    firsts = _arrange(weights / mean, costs, forced, max(max_blocks, len(starts) + 1))
    blocks = []
    for first, last in zip(firsts, [*firsts[1:], len(order)], strict=True):
        nodes = tuple(sorted(n for part in nodes_of[first:last] for n in part))
        blocks.append(NodeBlock(path=common_path(atoms.paths[n] for n in nodes), nodes=nodes))
    return tuple(blocks)


def named_starts(
    paths: Sequence[str], cuts: Sequence[str], modules: Sequence[tuple[str, str]] = ()
) -> list[int]:
    """Index of the first atom inside each named module, and for `modules` of the one after the last;
    ascending, each once.

    Naming the module that comes first cuts nothing off.
    """
    starts = set()
    for setting, name in (*(("cuts", cut) for cut in cuts), *modules):
        inside = [index for index, path in enumerate(paths) if holds(name, path)]
        if not inside:
            raise PlanError(unknown_module(setting, name, paths))
        starts |= {inside[0]} if setting == "cuts" else {inside[0], inside[-1] + 1}
    return sorted(starts - {0, len(paths)})


class _Clusters:
    """Clusters of atoms in a doubly linked list that is always a topological order of them."""

    def __init__(self, atoms: Atoms, starts: Sequence[int], seconds_per_byte: float) -> None:
        count = len(atoms.seconds)
        self.weight = list(atoms.seconds)
        self.nodes = [[i] for i in range(count)]
        self.path: list[list[str]] = [path.split("/") if path else [] for path in atoms.paths]
        self.segment = list(np.searchsorted(starts, np.arange(count), side="right"))
        self.alive = [True] * count
        self.taken_in = [0.0] * count  # weight merged over the cap in this round
        self.count = count
        self.before = list(range(-1, count - 1))
        self.after = [*range(1, count), -1]
        self.reads: list[dict[int, float]] = [{} for _ in range(count)]
        self.feeds: list[dict[int, float]] = [{} for _ in range(count)]
        for value in atoms.values:
            cost = value.nbytes * seconds_per_byte
            for consumer in value.consumers:
                feeds, reads = self.feeds[value.producer], self.reads[consumer]
                feeds[consumer] = feeds.get(consumer, 0.0) + cost
                reads[value.producer] = reads.get(value.producer, 0.0) + cost

    def order(self) -> Iterator[int]:
        """Living clusters in topological order."""
        cluster = next(c for c in range(len(self.alive)) if self.alive[c] and self.before[c] < 0)
        while cluster >= 0:
            yield cluster
            cluster = self.after[cluster]

    def coarsen(self, target: int) -> None:
        """Merge in rounds until at most `target` clusters are left, or only named cuts lie between them."""
        while self.count > target:
            if self._round(target, capped=True) == 0 and self._round(target, capped=False) == 0:
                return

    def _round(self, target: int, *, capped: bool) -> int:
        """Let every cluster, lightest first, merge once; returns the number of merges."""
        living = [c for c in range(len(self.alive)) if self.alive[c]]
        self.taken_in = [0.0] * len(self.alive)
        weights = np.asarray([self.weight[c] for c in living])
        share = float(weights.sum()) / target
        cap = max(float(weights.mean() + 2 * weights.std()), share) if capped else float("inf")
        matched: set[int] = set()
        merged = 0
        for cluster in (living[i] for i in np.argsort(weights, kind="stable")):
            if cluster in matched or not self.alive[cluster]:
                continue
            light = self.weight[cluster] <= NEGLIGIBLE * share
            other = self._best(cluster, cap, share if light else 0.0, matched)
            if other is not None:
                over = self.weight[cluster] if light else 0.0
                kept = self._merge(cluster, other)
                self.taken_in[kept] += over
                matched.add(kept)
                merged += 1
        return merged

    def _best(self, cluster: int, cap: float, room: float, matched: set[int]) -> int | None:
        """The best neighbour among those closest in the module tree; None if none of these may merge now.

        `room` is how much a neighbour may take in over the cap or a second time. Waiting for a close
        neighbour is better than joining another module: the end of a layer belongs to its layer.
        """
        weight, path, segment = self.weight[cluster], self.path[cluster], self.segment[cluster]
        closest, best, best_key = None, None, None
        for other in self._neighbours(cluster):
            if self.segment[other] != segment:
                continue
            traffic = self.feeds[cluster].get(other, 0.0) + self.reads[cluster].get(other, 0.0)
            close = (traffic > 0.0, shared_depth(path, self.path[other]))
            if closest is None or close > closest:
                closest, best, best_key = close, None, None
            total = weight + self.weight[other]
            fits = total <= cap and other not in matched
            if close < closest or not (fits or self.taken_in[other] + weight <= room):
                continue
            key = (total - traffic, other)
            if best_key is None or key < best_key:
                best, best_key = other, key
        return best

    def _neighbours(self, cluster: int) -> set[int]:
        """Clusters that may merge with this one: next in the order, or joined by the only edge of a side.

        Two clusters next to each other in a topological order have no path around; neither has an edge
        whose producer feeds nobody else, or whose consumer reads nobody else.
        """
        found = {self.before[cluster], self.after[cluster]} - {-1}
        feeds, reads = self.feeds[cluster], self.reads[cluster]
        if len(feeds) == 1:
            found.update(feeds)
        if len(reads) == 1:
            found.update(reads)
        found.update(other for other in feeds if len(self.reads[other]) == 1)
        found.update(other for other in reads if len(self.feeds[other]) == 1)
        return found

    def _merge(self, one: int, other: int) -> int:
        """Merge two neighbours; returns the cluster that lives on, at a place where the order holds."""
        producer, consumer = (one, other) if self._precedes(one, other) else (other, one)
        # The producer may wait for its only consumer; otherwise the consumer moves up to the producer.
        keep = producer
        if self.after[producer] != consumer and len(self.feeds[producer]) == 1:
            keep = consumer
        gone = consumer if keep == producer else producer
        self.nodes[keep] = self.nodes[producer] + self.nodes[consumer]
        self.weight[keep] += self.weight[gone]
        self.path[keep] = _joint(self.path[keep], self.path[gone])
        self._unlink(gone)
        _join(self.feeds, self.reads, keep, gone)
        _join(self.reads, self.feeds, keep, gone)
        return keep

    def _precedes(self, one: int, other: int) -> bool:
        if other in self.feeds[one]:
            return True
        return one not in self.feeds[other] and self.after[one] == other

    def _unlink(self, cluster: int) -> None:
        before, after = self.before[cluster], self.after[cluster]
        if before >= 0:
            self.after[before] = after
        if after >= 0:
            self.before[after] = before
        self.alive[cluster] = False
        self.count -= 1


def _joint(one: list[str], other: list[str]) -> list[str]:
    """Common path of two clusters; no path at all joins anything."""
    if not one or not other:
        return one or other
    return one[: shared_depth(one, other)]


def _join(out: list[dict[int, float]], back: list[dict[int, float]], keep: int, gone: int) -> None:
    """Hand the edges of one direction over to the cluster that lives on."""
    for other, cost in out[gone].items():
        del back[other][gone]
        if other != keep:
            out[keep][other] = out[keep].get(other, 0.0) + cost
            back[other][keep] = back[other].get(keep, 0.0) + cost
    out[gone] = {}


def _traffic(atoms: Atoms, order: list[list[int]]) -> np.ndarray:
    """Bytes of all values alive across the boundary before each position; float64 [positions]."""
    position = np.empty(len(atoms.seconds), np.int64)
    for place, nodes in enumerate(order):
        position[nodes] = place
    change = np.zeros(len(order) + 1)
    for value in atoms.values:
        first, last = position[value.producer], max(position[c] for c in value.consumers)
        change[first + 1] += value.nbytes
        change[last + 1] -= value.nbytes
    return np.cumsum(change)[:-1]


def _parted(atoms: Atoms, order: list[list[int]], weights: np.ndarray, mean: float) -> np.ndarray:
    """How bad it is for modules to be cut before each position, 0 to 1; float64 [positions].

    The module that a boundary parts is the run of clusters around it with the same innermost common
    path; runs, because some libraries give every layer the same name.
    """
    paths = [common_path(atoms.paths[n] for n in nodes) for nodes in order]
    known = [path for path in paths if path]
    if not known:
        return np.zeros(len(order))
    for place in range(len(paths)):  # clusters without a path belong to what is before them
        paths[place] = paths[place] or (paths[place - 1] if place else known[0])
    total = np.concatenate([[0.0], np.cumsum(weights)])
    parted = np.zeros(len(order))
    for place in range(1, len(order)):
        module = common_path([paths[place - 1], paths[place]])
        if not module:
            continue
        first, last = place - 1, place
        while first > 0 and _within(paths[first - 1], module):
            first -= 1
        while last + 1 < len(order) and _within(paths[last + 1], module):
            last += 1
        weight = total[last + 1] - total[first]
        parted[place] = min(1.0, mean / weight) if weight > 0 else 1.0
    return parted


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(module + "/")


def _arrange(weights: np.ndarray, costs: np.ndarray, forced: Sequence[int], max_blocks: int) -> list[int]:
    """Cut a row of clusters into at most `max_blocks` runs; returns the first position of each run.

    Minimises the sum of weight^2 over runs plus the costs of the boundaries, by dynamic programming
    over the number of runs and the end of the last one.
    """
    count = len(weights)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    costs = np.append(costs, 0.0)
    costs[0] = 0.0
    ends = np.arange(count + 1)
    barrier = np.zeros(count + 1, np.int64)  # the last forced boundary before each end
    for place in forced:
        barrier[place + 1 :] = place
    runs = (total[None, :] - total[:, None]) ** 2 + costs[:, None]  # [start, end]
    runs[(ends[:, None] >= ends[None, :]) | (ends[:, None] < barrier[None, :])] = np.inf
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    choices, results = [], []
    for _ in range(min(max_blocks, count)):
        candidates = best[:, None] + runs
        choices.append(np.argmin(candidates, axis=0))
        best = np.min(candidates, axis=0)
        results.append(best[count])
    firsts, end = [], count
    for choice in reversed(choices[: int(np.argmin(results)) + 1]):
        end = int(choice[end])
        firsts.append(end)
    return firsts[::-1]
