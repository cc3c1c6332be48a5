"""Topological orders of blocks, and the ideals (sets closed under "comes before") they pass through.

A plan's stages are the differences of a chain of ideals. The exact search walks all ideals; the fast
one walks the prefixes of a few good orders. Sets of blocks are bit masks: bit b is block b.
"""

from collections.abc import Sequence

from rannc_jax.cost.table import BlockValue


def predecessor_masks(num_blocks: int, values: Sequence[BlockValue]) -> list[int]:
    """For each block, the mask of blocks whose values it reads."""
    masks = [0] * num_blocks
    for value in values:
        for consumer in value.consumers:
            masks[consumer] |= 1 << value.producer
    return masks


def ideals(num_blocks: int, values: Sequence[BlockValue], *, limit: int) -> list[int] | None:
    """All ideals as masks, smallest first; None if there are more than `limit`."""
    needs = predecessor_masks(num_blocks, values)
    found, frontier = {0}, [0]
    while frontier:
        grown: list[int] = []
        for ideal in frontier:
            for block in range(num_blocks):
                larger = ideal | (1 << block)
                if larger not in found and not ideal >> block & 1 and needs[block] & ~ideal == 0:
                    found.add(larger)
                    grown.append(larger)
            if len(found) > limit:
                return None
        frontier = grown
    return sorted(found, key=lambda mask: (mask.bit_count(), mask))


def members(mask: int) -> tuple[int, ...]:
    """The blocks in a mask, ascending."""
    return tuple(block for block in range(mask.bit_length()) if mask >> block & 1)


def orders(num_blocks: int, values: Sequence[BlockValue]) -> list[tuple[int, ...]]:
    """Distinct good topological orders, the blocks' own first.

    The second one is greedy: next comes the block that leaves the fewest bytes open between what is
    placed and what is not, ties by index. On a chain both are the same.
    """
    own = tuple(range(num_blocks))
    greedy = _narrow_order(num_blocks, values)
    return [own] if greedy == own else [own, greedy]


def _narrow_order(num_blocks: int, values: Sequence[BlockValue]) -> tuple[int, ...]:
    needs = predecessor_masks(num_blocks, values)
    placed, order = 0, []
    for _ in range(num_blocks):
        ready = [b for b in range(num_blocks) if not placed >> b & 1 and needs[b] & ~placed == 0]
        block = min(ready, key=lambda b: (_open_bytes(placed | 1 << b, values), b))
        placed |= 1 << block
        order.append(block)
    return tuple(order)


def _open_bytes(placed: int, values: Sequence[BlockValue]) -> float:
    """Bytes of one row that are made inside `placed` and still read outside."""
    return sum(
        value.bytes_per_row + value.fixed_bytes
        for value in values
        if placed >> value.producer & 1 and any(not placed >> c & 1 for c in value.consumers)
    )
