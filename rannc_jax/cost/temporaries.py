"""Peak bytes of what lives inside one compiled program besides its arguments and results.

XLA:CPU's own steps are followed: kernels (`kernels`) run breadth first as their operands become ready, a
loop kernel writes over an operand that dies in it, and a temporary may lie in the place of a result that
is not there yet. GPU programs are ordered for memory instead; for them the same walk is an upper bound.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rannc_jax.cost.kernels import Buffer, Kernel, Kernels
from rannc_jax.cost.operations import Operation, Operations


@dataclass(slots=True, eq=False)
class _Life:
    """A buffer from the kernel that makes it to the last that reads it, both positions in the order."""

    size: int
    start: int
    end: int


def temporary_bytes(ops: Operations, num_donated: int = 0) -> int:
    """The peak.

    Args:
        ops: an opened program.
        num_donated: how many of the first results take the place of arguments.

    Complexity: about linear in the kernels; quadratic in those that overlap.
    """
    formed = Kernels(ops, _inside)
    order = _breadth_first(formed.kernels)
    temporaries, results = _lives(formed, order, num_donated)
    left = _not_hosted(temporaries, results)
    scratch = [(at, kernel.scratch) for at, kernel in enumerate(order) if kernel.scratch]
    return _peak([*left, *(_Life(size, at, at) for at, size in scratch)], len(order))


def _inside(op: Operation) -> int:
    """What a loop's body needs in a turn; of branches, the largest."""
    return max((temporary_bytes(body) for body, _ in op.bodies), default=0)


def _breadth_first(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The order in which kernels become ready when inputs are handed out one by one."""
    makers = {buffer for kernel in kernels for buffer in kernel.writes}
    waits = [len(set(kernel.reads)) for kernel in kernels]
    readers: dict[Buffer, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for buffer in dict.fromkeys(kernel.reads):
            readers.setdefault(buffer, []).append(k)
    order: list[Kernel] = []
    ready: deque[int] = deque(k for k, count in enumerate(waits) if count == 0)

    def hand_out(buffers: Iterable[Buffer]) -> None:
        for k in (k for buffer in buffers for k in readers.get(buffer, ())):
            waits[k] -= 1
            if waits[k] == 0:
                ready.append(k)

    hand_out(sorted((b for b in readers if b not in makers), key=lambda b: b[0]))
    while ready:
        order.append(kernels[ready.popleft()])
        hand_out(order[-1].writes)
    return order


def _lives(formed: Kernels, order: Sequence[Kernel], num_donated: int) -> tuple[list[_Life], list[_Life]]:
    """Temporaries, and results that have a place of their own."""
    results = set(formed.results)
    donated = set(formed.results[:num_donated])
    last = {buffer: at for at, kernel in enumerate(order) for buffer in kernel.reads}
    temporaries: dict[Buffer, _Life] = {}
    places: list[_Life] = []
    for at, kernel in enumerate(order):
        for buffer in kernel.writes:
            life = _Life(formed.nbytes(buffer), at, last.get(buffer, at))
            if buffer in donated:
                continue
            if buffer in results:
                life.end = len(order)
                places.append(life)
            else:
                temporaries[buffer] = life
        if kernel.inplace:
            size = formed.nbytes(kernel.writes[0])
            dying = (temporaries[b] for b in kernel.reads if b in temporaries and last[b] == at)
            heir = next((life for life in dying if life.size == size), None)
            if heir is not None:
                heir.end = at - 1
    return list(temporaries.values()), places


def _not_hosted(temporaries: Sequence[_Life], results: Sequence[_Life]) -> list[_Life]:
    """Temporaries that find no place in a result that is made later."""
    guests: list[list[_Life]] = [[result] for result in sorted(results, key=lambda x: -x.size)]
    left: list[_Life] = []
    for life in sorted(temporaries, key=lambda x: -x.size):
        host = next(
            (
                group
                for group in reversed(guests)
                if group[0].size >= life.size and all(g.end < life.start or life.end < g.start for g in group)
            ),
            None,
        )
        (left if host is None else host).append(life)
    return left


def _peak(lives: Sequence[_Life], length: int) -> int:
    change = [0] * (length + 2)
    for life in lives:
        change[life.start] += life.size
        change[max(life.end, life.start) + 1] -= life.size
    total = peak = 0
    for step in change:
        total += step
        peak = max(peak, total)
    return peak
