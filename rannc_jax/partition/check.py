"""Whether a decision may be run: an independent look at its stages, devices, memory and constraints."""

from collections import Counter
from collections.abc import Mapping

from rannc_jax.cluster import ClusterSpec
from rannc_jax.cost.table import CostTable
from rannc_jax.errors import PlanError, message
from rannc_jax.ir.paths import holds
from rannc_jax.partition.constraints import AUTO, Constraints
from rannc_jax.partition.decision import Decision
from rannc_jax.partition.manual import resolve_cuts


def check_decision(
    decision: Decision, costs: CostTable, cluster: ClusterSpec, constraints: Constraints, *, rows: int
) -> None:
    """Check a decision against its program and cluster.

    The bytes of all stages on a device are held against its limit.

    Raises:
        PlanError: lists every mistake: blocks that are missing or placed twice, values that flow back,
            devices that are shared or not there, rows that do not divide, memory above the limit, constraints
            that do not hold.
    """
    mistakes = [
        *_block_mistakes(decision, len(costs.blocks)),
        *_flow_mistakes(decision, costs),
        *_device_mistakes(decision, cluster),
        *_row_mistakes(decision, rows),
        *_memory_mistakes(decision, cluster, constraints),
        *_constraint_mistakes(decision, costs, constraints, rows),
    ]
    if mistakes:
        raise PlanError(message("the plan does not hold together.", *mistakes))


def _block_mistakes(decision: Decision, num_blocks: int) -> list[str]:
    counts = Counter(block for stage in decision.stages for block in stage.blocks)
    missing = [block for block in range(num_blocks) if block not in counts]
    twice = sorted(block for block, count in counts.items() if count > 1)
    unknown = sorted(block for block in counts if not 0 <= block < num_blocks)
    found = (("in no stage", missing), ("in several stages", twice), ("not of this program", unknown))
    mistakes = [f"blocks {what}: {blocks}" for what, blocks in found if blocks]
    empty = [index for index, stage in enumerate(decision.stages) if not stage.blocks]
    return mistakes + [f"stage {index} has no block" for index in empty]


def _flow_mistakes(decision: Decision, costs: CostTable) -> list[str]:
    stage_of = {block: index for index, stage in enumerate(decision.stages) for block in stage.blocks}
    return [
        f"value {value.name!r} flows from stage {stage_of[value.producer]} back to {stage_of[consumer]}"
        for value in costs.values
        for consumer in value.consumers
        if stage_of.get(consumer, len(stage_of)) < stage_of.get(value.producer, -1)
    ]


def _device_mistakes(decision: Decision, cluster: ClusterSpec) -> list[str]:
    counts = Counter(device for stage in decision.stages for device in stage.devices)
    chunks = decision.schedule.num_chunks
    shared = sorted(device for device, count in counts.items() if count > chunks)
    unknown = sorted(device for device in counts if not 0 <= device < cluster.num_devices)
    found = (("used too often", shared), (f"not among the {cluster.num_devices} of the cluster", unknown))
    mistakes = [f"devices {what}: {devices}" for what, devices in found if devices]
    idle = [index for index, stage in enumerate(decision.stages) if not stage.devices]
    return mistakes + [f"stage {index} has no device" for index in idle]


def _row_mistakes(decision: Decision, rows: int) -> list[str]:
    if rows % decision.num_microbatches:
        return [f"{rows} rows do not divide into {decision.num_microbatches} microbatches"]
    microbatch = rows // decision.num_microbatches
    return [
        f"stage {index}: {microbatch} rows of a microbatch do not divide over {stage.num_replicas} replicas"
        for index, stage in enumerate(decision.stages)
        if stage.num_replicas and microbatch % stage.num_replicas
    ]


def _memory_mistakes(decision: Decision, cluster: ClusterSpec, constraints: Constraints) -> list[str]:
    needed: Counter[int] = Counter()
    stages_of: dict[int, list[int]] = {}
    for index, stage in enumerate(decision.stages):
        for device in stage.devices:
            needed[device] += stage.peak_bytes
            stages_of.setdefault(device, []).append(index)
    mistakes: dict[tuple[int, ...], str] = {}
    for device in sorted(needed):
        if not 0 <= device < cluster.num_devices:
            continue
        limit, stages = constraints.limit_bytes(cluster.device(device)), tuple(stages_of[device])
        if needed[device] > limit:
            name = f"stage {stages[0]} needs" if len(stages) == 1 else f"stages {list(stages)} need"
            mistakes[stages] = f"{name} {needed[device]} bytes, its devices have {limit}"
    return list(mistakes.values())


def _constraint_mistakes(
    decision: Decision, costs: CostTable, constraints: Constraints, rows: int
) -> list[str]:
    """What was asked for and is not in the decision."""
    paths = [block.modules for block in costs.blocks]
    wrong = []
    if constraints.num_stages not in (AUTO, decision.num_stages):
        wrong.append(f"num_stages: asked for {constraints.num_stages}, got {decision.num_stages}")
    if constraints.schedule_name not in (None, decision.schedule.name):
        wrong.append(f"schedule: asked for {constraints.schedule_name}, got {decision.schedule.name}")
    wanted, found = constraints.num_microbatches, decision.num_microbatches
    if isinstance(wanted, tuple) and not wanted[0] <= found <= wanted[1]:
        wrong.append(f"num_microbatches: asked for {wanted}, got {found}")
    if isinstance(wanted, int) and (found > wanted or (found < wanted and rows % wanted == 0)):
        wrong.append(f"num_microbatches: asked for {wanted}, got {found}")
    if constraints.cuts != AUTO:
        begins = tuple(min(stage.blocks) for stage in decision.stages[1:])
        if begins != resolve_cuts(constraints.cuts, paths):
            wrong.append(f"cuts: asked for {constraints.cuts}, stages begin at blocks {begins}")
    for name, setting in constraints.by_stage.items():
        attribute = {"replicas": "num_replicas"}.get(name, name)
        for index, stage in enumerate(decision.stages):
            found = getattr(stage, attribute)
            asked = [constraints.of_stage(name, index)]
            if isinstance(setting, Mapping):
                inside = [path for block in stage.blocks for path in paths[block]]
                asked += [
                    value
                    for module, value in setting.items()
                    if isinstance(module, str) and any(holds(module, path) for path in inside)
                ]
            wrong += [
                f"{name}: asked for {value} of stage {index}, got {found}"
                for value in asked
                if value not in (None, found)
            ]
    return wrong
