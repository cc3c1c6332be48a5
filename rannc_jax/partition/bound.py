"""A step time that no plan of this program on this cluster can beat.

For one number of microbatches m, every plan takes at least

- the work of all blocks, each at its cheapest number of replicas, spread evenly over all devices;
- for each block: its path down from the inputs for the first microbatch, its own m microbatches at the
  most replicas its rows allow, and its path back up for the last one, beside which gradients of weights may
  still run where a schedule puts them off.

Best cases throughout: no recomputation, no transfers or collectives, no memory limit, the fastest kind of
device, the update shared by all. The bound is the least over all m. It never exceeds the optimum; the gap
to it is stated in the plan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rannc_jax.contract import Remat
from rannc_jax.partition.stage import StageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCase:
    """Seconds that blocks take at least with one number of microbatches, by block.

    Args:
        num_microbatches: m.
        work_s: device-seconds of one microbatch, forward and backward.
        span_s: seconds of one microbatch, forward and backward.
        later_s: of these, what may be put off until the gradients of inputs are on their way.
        forward_s, backward_s: seconds of one microbatch, each alone, what may be put off left out.
        before_s: seconds of forwards that the block waits for at least (a longest path).
        after_s: seconds of backwards that wait for the block at least (a longest path).
        update_s: device-seconds once a step.
    """

    num_microbatches: int
    work_s: tuple[float, ...]
    span_s: tuple[float, ...]
    later_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    update_s: tuple[float, ...]

    def shared_s(self, blocks: Iterable[int], num_devices: int) -> float:
        """Least seconds of a step in which `num_devices` share the work of `blocks`."""
        m = self.num_microbatches
        return sum(m * self.work_s[b] + self.update_s[b] for b in blocks) / num_devices

    def step_s(self, num_devices: int) -> float:
        """The bound for this number of microbatches."""
        m, blocks = self.num_microbatches, range(len(self.work_s))
        paths = (
            self.before_s[b]
            + m * self.span_s[b]
            + max(self.after_s[b] - m * self.later_s[b], self.update_s[b] / num_devices)
            for b in blocks
        )
        return max(self.shared_s(blocks, num_devices), *paths)


def best_case(
    model: StageModel, num_microbatches: int, *, trains: bool, splits_backward: bool = False
) -> BestCase:
    """The best case of every block; O((blocks x replica counts + values) x device kinds).

    `splits_backward`: a schedule may put gradients of weights off.
    """
    microbatch_rows = model.rows // num_microbatches
    replicas = [r for r in range(1, min(model.num_devices, microbatch_rows) + 1) if microbatch_rows % r == 0]
    work, span, forward, backward, later = [], [], [], [], []
    for block in range(model.num_blocks):
        costs, weights = [], []
        for r in replicas:
            for kind in range(len(model.kinds)):
                price = model.block_price(block, microbatch_rows // r, kind)
                back = min(price.backward_s[remat] for remat in Remat) if trains else 0.0
                costs.append((r, price.forward_s, back))
                weights.append(price.weight_s if trains and splits_backward else 0.0)
        work.append(min(r * (there + back) for r, there, back in costs))
        span.append(min(there + back for _, there, back in costs))
        forward.append(min(there for _, there, _ in costs))
        later.append(max(weights))
        backward.append(max(0.0, min(back for _, _, back in costs) - later[-1]))
    before, after = _paths(model, forward, backward, trains=trains)
    fastest = max(kind.bytes_per_s for kind in model.kinds)
    return BestCase(
        num_microbatches=num_microbatches,
        work_s=tuple(work),
        span_s=tuple(span),
        later_s=tuple(later),
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        before_s=before,
        after_s=after,
        update_s=tuple(block.state.update_bytes / fastest for block in model.blocks),
    )


def lower_bound(
    model: StageModel, num_microbatches: Sequence[int], *, trains: bool, splits_backward: bool = False
) -> float:
    """The least step of any plan with one of these numbers of microbatches, in seconds."""
    cases = (best_case(model, m, trains=trains, splits_backward=splits_backward) for m in num_microbatches)
    return min(case.step_s(model.num_devices) for case in cases)


def _paths(
    model: StageModel, forward: Sequence[float], backward: Sequence[float], *, trains: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Longest forward path into each block, and longest backward path out of it, itself excluded."""
    before, after = [0.0] * model.num_blocks, [0.0] * model.num_blocks
    for value in sorted(model.values, key=lambda value: value.producer):
        source = value.producer
        for target in value.consumers:
            before[target] = max(before[target], before[source] + forward[source])
            if trains and value.needs_grad:
                after[target] = max(after[target], after[source] + backward[source])
    return tuple(before), tuple(after)
