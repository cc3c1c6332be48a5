"""What the stages of a layout are: what each reads and makes, where leaves live, and how values are called.

Keys of values, all tuples:

    ("param", v) ("held", v, s) ("state", v, i)      parameters, constants, model state before microbatch i
    ("batch", v, i, s) ("rng", i, s) ("valid", i, s) what microbatch i brings to stage s
    ("pro", v, s)                                    a result of the stage's prologue
    ("act", v, i, s) ("ct", v, i, s, t)              a value on stage s; its cotangent from s, on t
    ("res", n, i, s) ("front", n, i, s)              residuals; what an I hands to its W
    ("acc", v, s, n) ("seed", i)                     accumulators; weight of a microbatch's loss
    ("out", k, i)                                    program output k of microbatch i
    ("grad", v) ("loss",) ("scale", s)               what the optimizer reads
"""

from collections.abc import Mapping

from rannc_jax.errors import TraceError, message
from rannc_jax.ir.align import Aligned
from rannc_jax.ir.batch import LossKind, RowLayout
from rannc_jax.ir.graph import Graph, written_state
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.ir.stage_shape import StageShape, stage_shape
from rannc_jax.runtime.layout import Layout
from rannc_jax.runtime.ops import Key
from rannc_jax.runtime.stage import Seeding, Spread, StagePrograms


class StageTable:
    """The stages of one function over one layout.

    Args:
        graph: of the function.
        layout: where the work goes.
        traces: the function traced with the rows each stage's program sees (rows -> trace).
        batch_grads: batch inputs whose gradient is asked for.
        train: with backward; else forward only.
    """

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        traces: Mapping[int, Aligned],
        *,
        batch_grads: frozenset[int] = frozenset(),
        train: bool = True,
    ) -> None:
        self.graph, self.layout, self.train = graph, layout, train
        self.written = written_state(graph.program)
        self.node_stage = {n: s for s, blocks in enumerate(layout.stages) for block in blocks for n in block}
        self.loss_position = next(
            (k for k, leaf in enumerate(graph.program.outputs) if leaf.kind is OutputKind.LOSS), None
        )
        self.batch_grads = batch_grads
        self.shapes = [self._shape(s) for s in range(len(layout.stages))]
        self.owner = self._owners()
        self._check_outputs()
        self.code: list[StagePrograms] = []
        for s in reversed(range(len(layout.stages))):  # later stages know which cotangents they send back
            self.code.insert(0, self._code(s, traces))

    @property
    def num_stages(self) -> int:
        return len(self.layout.stages)

    def result_stage(self, position: int) -> int:
        """The stage that computes a program output: its node's, or the last one."""
        node = self.graph.outputs[position]
        if node is not None:
            return self.node_stage[node]
        state = next((v for v, k in self.written.items() if k == position), None)
        readers = [self.node_stage[n] for n, x in enumerate(self.graph.nodes) if state in x.inputs]
        return min(readers, default=self.num_stages - 1)

    @property
    def loss_stage(self) -> int:
        assert self.loss_position is not None
        return self.result_stage(self.loss_position)

    def results(self) -> list[int]:
        """Positions of the program outputs that are computed (unwritten model_state is not)."""
        kept = set(self.written.values())
        return [
            k
            for k, leaf in enumerate(self.graph.program.outputs)
            if leaf.kind is not OutputKind.MODEL_STATE or k in kept
        ]

    def extra(self, stage: int) -> list[int]:
        rule = self.graph.info.loss
        if self.loss_position is None or rule is None or rule.kind is not LossKind.WEIGHTED:
            return []
        if stage != self.loss_stage:
            return []
        assert rule.weight is not None
        return list(dict.fromkeys([rule.weight, rule.divisor if rule.divisor is not None else rule.weight]))

    def _shape(self, stage: int) -> StageShape:
        mine = [k for k in self.results() if self.result_stage(k) == stage]
        return stage_shape(
            self.graph, stage, self.layout.stages[stage], mine, self.extra(stage), self.written
        )

    def _owners(self) -> dict[int, int]:
        """The stage each input leaf lives on: the first that reads it, or stage 0."""
        owner: dict[int, int] = {}
        for v, leaf in enumerate(self.graph.program.inputs):
            if leaf.role in (Role.PARAM, Role.FROZEN, Role.CONST, Role.MODEL_STATE):
                readers = [s.index for s in self.shapes if v in s.params or v in s.held or v in s.state]
                owner[v] = readers[0] if readers else 0
        return owner

    def _check_outputs(self) -> None:
        """Refuse outputs whose rows could not be put together again."""
        program, info = self.graph.program, self.graph.info
        for k in self.results():
            v = program.output_ids()[k]
            layout = None if v is None else info.layouts[v]
            path = program.outputs[k].path
            mesh = self.layout.meshes[self.result_stage(k)]
            whole = self.layout.num_microbatches == 1 and mesh.size == 1
            if layout is not None and not layout.contiguous and not whole:
                raise TraceError(
                    message(
                        f"the rows of {path} do not lie together.",
                        f"its dim {layout.dim} holds [{layout.outer}, rows, {layout.inner}] merged",
                        hint="return it with the rows in a dim of their own, or outermost in a merged one.",
                    )
                )

    def _is_asked(self, v: int, stage: int) -> bool:
        """Whether a stage behind `stage` sends a cotangent of a value back."""
        later = zip(self.shapes[stage + 1 :], self.code, strict=True)
        return any(v in shape.crossing_in and _sends(code, v) for shape, code in later)

    def _code(self, stage: int, traces: Mapping[int, Aligned]) -> StagePrograms:
        layout, shape = self.layout, self.shapes[stage]
        mesh = layout.meshes[stage]
        rows = layout.rows // mesh.size if layout.spread is Spread.PER_REPLICA else layout.rows
        seeding = None
        rule = self.graph.info.loss
        if self.train and self.loss_position is not None and stage == self.loss_stage:
            outputs = shape.part.outputs
            extra = self.extra(stage)
            weighted = rule is not None and rule.kind is LossKind.WEIGHTED
            seeding = Seeding(
                position=len(outputs) + shape.part.results.index(self.loss_position),
                weight=outputs.index(extra[0]) if weighted else None,
                divisor=outputs.index(extra[-1]) if weighted else None,
                select=weighted or layout.padded,
            )
        return StagePrograms(
            self.graph,
            traces[rows],
            shape,
            mesh,
            layout.spread,
            remat=layout.remats[stage],
            seeding=seeding,
            asked=frozenset(v for v in shape.crossing_out if self._is_asked(v, stage)),
            batch_grads=self.batch_grads,
            masked=layout.padded,
            mask_scale=rule is not None and rule.kind in (LossKind.MEAN, LossKind.MEAN_OF_MEANS),
        )

    def lasting(self, v: int, s: int) -> Key:
        """The key of a parameter or held leaf on a stage."""
        if self.graph.program.inputs[v].role is Role.PARAM:
            return ("param", v) if self.owner[v] == s else ("param", v, s)
        return ("held", v, s)

    def input_key(self, v: int, i: int, s: int) -> Key:
        inputs = self.graph.program.inputs
        if v >= len(inputs):
            shape = self.shapes[s]
            return ("act", v, i, s) if v in shape.crossing_in else ("pro", v, s)
        role = inputs[v].role
        if role is Role.BATCH:
            return ("batch", v, i, s)
        if role is Role.RNG:
            return ("rng", i, s)
        if role is Role.MODEL_STATE and v in self.written:
            return ("state", v, i)
        return self.lasting(v, s)

    def result_key(self, position: int, i: int) -> Key:
        for v, k in self.written.items():
            if k == position:
                return ("state", v, i + 1)
        return ("out", position, i)

    def value_layout(self, v: int) -> RowLayout | None:
        return self.graph.info.layouts[v]

    def gradient_key(self, v: int, i: int, s: int) -> Key:
        return ("ct", v, i, s, s) if v >= len(self.graph.program.inputs) else ("batch_grad", v, i, s)

    def takers(self, v: int) -> list[int]:
        """Stages that send a cotangent of a value back, ascending."""
        return [
            t for t, shape in enumerate(self.shapes) if v in shape.crossing_in and _sends(self.code[t], v)
        ]


def _sends(code: StagePrograms, v: int) -> bool:
    return code.differentiates and v in code.gradient_ids
