"""`solve_graph`: the best way to spread a DAG over devices that its values pass in one order."""

import time
from collections.abc import Hashable, Iterable, Sequence

from rannc_jax.dag.chain import Chain, Loads, best_chain
from rannc_jax.dag.data import CostGraph, GraphPlan, Objective
from rannc_jax.dag.groups import Groups, make_groups
from rannc_jax.dag.ideals import all_ideals, nearby, orders, prefixes
from rannc_jax.dag.line import Line, spread_places
from rannc_jax.dag.loads import LoadTable
from rannc_jax.errors import InfeasibleError, PlanError, message
from rannc_jax.mistakes import one_of

_NUM_ORDERS = 12
_POOL = 1500
_STATES = 300_000
"""Ideals looked at together times values between groups: what a table of loads is held to."""
_PLACES = 1200
"""Of an order, priced at once."""
_MOST_ROUNDS = 20
_MOST_CAPS = 400


def solve_graph(
    graph: CostGraph,
    num_devices: int,
    objective: Objective | str = Objective.MAX_LOAD,
    *,
    num_microbatches: int | None = None,
    most_ideals: int = 6000,
) -> GraphPlan:
    """Give every node a device.

    The nodes of a device are convex (no path leaves them and comes back), and devices are in the order in
    which values pass them. A device's load is the seconds of its nodes, of each value it sends (once) and
    of each value it takes in.

    Args:
        graph: nodes and edges with costs.
        num_devices: at most so many are used.
        objective: see `Objective`.
        num_microbatches: for STEP_TIME; four a device if left out.
        most_ideals: a graph with no more ideals is solved exactly. Time and memory grow with the square.
            A graph with more is searched around its good topological orders, and the gap to the lower
            bound is what is known.

    Raises:
        InfeasibleError: nothing fits the devices' memory.
        PlanError: an argument makes no sense.

    Example:
        >>> from rannc_jax.dag import CostGraph, GraphNode, GraphEdge
        >>> chain = CostGraph(
        ...     nodes=tuple(GraphNode(id=name, seconds=1.0) for name in "abcd"),
        ...     edges=tuple(GraphEdge(source=a, target=b, seconds=0.1) for a, b in ("ab", "bc", "cd")),
        ... )
        >>> plan = solve_graph(chain, 2)
        >>> plan.objective, plan.is_optimal, dict(plan.devices)
        (2.1, True, {'a': 0, 'b': 0, 'c': 1, 'd': 1})
    """
    began = time.perf_counter()
    objective = _checked(num_devices, objective, num_microbatches)
    further = 0 if objective is Objective.MAX_LOAD else (num_microbatches or 4 * num_devices) - 1
    groups = make_groups(graph)
    search = _Search(groups, num_devices, objective, further)
    best, pool, is_complete = search.around_orders(), set[int](), False
    ideals = all_ideals(groups, most_ideals)
    if ideals is not None:
        found, is_complete = search.improved(ideals, best)
        best, pool = found or best, set(ideals)
    else:
        best, pool = search.widened(best)
    if best is None:
        raise InfeasibleError(_does_not_fit(groups, num_devices, proved=ideals is not None))
    value, bound = search.value(best), search.lower_bound()
    is_optimal = is_complete or value <= bound * (1 + 1e-12)
    return GraphPlan(
        devices=_devices(groups, best),
        loads=best.loads,
        objective=value,
        lower_bound=value if is_optimal else bound,
        is_optimal=is_optimal,
        num_ideals=len(pool),
        seconds=time.perf_counter() - began,
    )


class _Search:
    def __init__(self, groups: Groups, num_devices: int, objective: Objective, further: int) -> None:
        self.groups, self.num_devices, self.objective, self.further = groups, num_devices, objective, further

    def value(self, chain: Chain) -> float:
        """What is made small."""
        if self.objective is Objective.MAX_LOAD:
            return chain.largest
        return chain.total + self.further * chain.largest

    def lower_bound(self) -> float:
        """No chain is better: no device is idle and nothing is sent."""
        total = sum(self.groups.seconds)
        largest = max(total / self.num_devices, max(self.groups.seconds, default=0.0))
        return largest if self.objective is Objective.MAX_LOAD else total + self.further * largest

    def improved(self, ideals: Iterable[int], best: Chain | None) -> tuple[Chain | None, bool]:
        """A chain of these ideals that is better than `best`, or None; whether that was shown."""
        return self._improved(LoadTable(self.groups, list(ideals)), best)

    def _improved(self, table: Loads, best: Chain | None) -> tuple[Chain | None, bool]:
        if self.objective is Objective.MAX_LOAD:
            cap = float("inf") if best is None else best.largest
            chain = best_chain(table, self.num_devices, cap=cap, inclusive=best is None, add_up=False)
            return chain, True
        return self._best_sum(table, best)

    def _best_sum(self, table: Loads, best: Chain | None) -> tuple[Chain | None, bool]:
        """The smallest sum of loads under one cap after another, each below the largest load before."""
        balanced = best_chain(table, self.num_devices, cap=float("inf"), inclusive=True, add_up=False)
        if balanced is None:
            return None, True
        least = balanced.largest
        found = best_chain(table, self.num_devices, cap=least, inclusive=True, add_up=True) or balanced
        known = self.value(found)
        if best is not None and self.value(best) <= known:
            found, known = None, self.value(best)
        # A chain with a larger largest load than this costs more, even if nothing is sent.
        unsent = sum(self.groups.seconds)
        cap = (known - unsent) / self.further if self.further else float("inf")
        inclusive = True
        for _ in range(_MOST_CAPS):
            chain = best_chain(table, self.num_devices, cap=cap, inclusive=inclusive, add_up=True)
            # Under a smaller cap the sum is no smaller, and no largest load is below the balanced one.
            if chain is None or chain.total + self.further * least >= known:
                return found, True
            if self.value(chain) < known:
                found, known = chain, self.value(chain)
            cap, inclusive = chain.largest, False
        return found, False

    def around_orders(self, best: Chain | None = None, seed: int = 0) -> Chain | None:
        """The best chain along good topological orders that pass through the cuts of the best one known."""
        through = () if best is None else best.ideals
        count = max(4, min(_NUM_ORDERS, 20_000 // max(1, len(self.groups.needs))))
        found = orders(self.groups, through, count, seed)
        pool = {ideal for order in found for ideal in prefixes(order)} if self._room(found) else set[int]()
        if pool:
            return self.improved(pool, best)[0] or best
        for order in found:
            best = self._along(order, best)
        return best

    def _room(self, found: Sequence[Sequence[int]]) -> bool:
        """Whether ideals of several orders may be looked at together, so that a chain can change over."""
        return sum(map(len, found)) <= self._most_ideals

    @property
    def _most_ideals(self) -> int:
        return max(64, min(2 * _POOL, _STATES // max(1, len(self.groups.values))))

    def _along(self, order: Sequence[int], best: Chain | None) -> Chain | None:
        """The best chain of one order: of all its places, or of some thousand that close in on its cuts."""
        work = [self.groups.seconds[group] for group in order]
        near: list[int] = []
        while True:
            places = spread_places(work, _PLACES, near)
            found = self._improved(Line(self.groups, order, places), best)[0]
            if found is None:
                return best
            best, before = found, near
            near = [ideal.bit_count() for ideal in found.ideals]
            if len(places) > len(order) or near == before:
                return best

    def widened(self, best: Chain | None) -> tuple[Chain | None, set[int]]:
        """Look around the cuts of the best chain until nothing better is found."""
        pool: set[int] = set()
        for number in range(1, _MOST_ROUNDS + 1):
            before = best
            best = self.around_orders(best, number)
            cuts = () if best is None else best.ideals
            pool = nearby(self.groups, {0, self.groups.everything, *cuts}, min(_POOL, self._most_ideals))
            best = self.improved(pool, best)[0] or best
            if best is before and best is not None:
                break
        return best, pool


def _devices(groups: Groups, chain: Chain) -> dict[Hashable, int]:
    devices: dict[Hashable, int] = {}
    before = 0
    for device, ideal in enumerate(chain.ideals):
        for group, members in enumerate(groups.members):
            if (ideal & ~before) >> group & 1:
                devices.update(dict.fromkeys(members, device))
        before = ideal
    return devices


def _checked(num_devices: int, objective: Objective | str, num_microbatches: int | None) -> Objective:
    if num_devices < 1:
        raise PlanError(message(f"num_devices={num_devices!r} makes no sense.", "expected: 1 or more"))
    if num_microbatches is not None and num_microbatches < 1:
        raise PlanError(
            message(f"num_microbatches={num_microbatches!r} makes no sense.", "expected: 1 or more")
        )
    try:
        return Objective(objective)
    except ValueError:
        choices = one_of(choice.value for choice in Objective)
        raise PlanError(message(f"objective={objective!r} is not known.", f"expected: {choices}")) from None


def _does_not_fit(groups: Groups, num_devices: int, *, proved: bool) -> str:
    limit = groups.memory_bytes or 0.0
    total, largest = sum(groups.bytes), max(groups.bytes)
    heavy = groups.members[groups.bytes.index(largest)]
    return message(
        f"infeasible: no assignment to {num_devices} devices fits {limit:,.0f} bytes each."
        if proved or total > num_devices * limit or largest > limit
        else f"no assignment to {num_devices} devices of {limit:,.0f} bytes each was found.",
        f"all nodes need {total:,.0f} bytes",
        f"what must share a device needs up to {largest:,.0f} bytes (with node {heavy[0]!r})",
        hint=f"{max(num_devices + 1, int(-(-total // max(limit, 1))))} devices, or more memory",
    )
