"""Where a step's lasting values live: every leaf of the state, or slice of a stacked
leaf, is one array on the devices of its stage."""

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rannc_jax.ir.leaves import Slicing
from rannc_jax.ir.roles import Role
from rannc_jax.runtime.engine import Prepared
from rannc_jax.runtime.given import check_like
from rannc_jax.runtime.offload import at_rest
from rannc_jax.runtime.optimizer import OptimizerCut, grad_dtype
from rannc_jax.runtime.shares import Shares
from rannc_jax.runtime.stacked import flat_parts, packed, part_of, slicings_of
from rannc_jax.runtime.state import TrainState
from rannc_jax.runtime.transfer import move, place, settled
from rannc_jax.runtime.update import init_state, update_parts

Lies = Callable[[int, Any], Any]  # position and value of a part of a leaf -> the value where it lies


def shapes_of(params: Any, rng: Any) -> Any:
    """The parameters as given, or, for an `init_fn(key)`, the shapes of what it makes."""
    return jax.eval_shape(params, _init_key(rng)) if _is_init(params) else params


def _is_init(params: Any) -> bool:
    """Whether this is a function, and not a pytree that can be called."""
    return callable(params) and jax.tree_util.all_leaves([params])


def _init_key(rng: Any) -> Any:
    return None if rng is None else jax.random.fold_in(rng, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """The homes of parameters, optimizer state and the rest.

    Args:
        meshes: one a stage.
        home: the lowering of the batch shape that was planned; its table says who owns what.
        cut: the optimizer over the stages, None for forward only.
    """

    meshes: tuple[Mesh, ...]
    home: Prepared
    cut: OptimizerCut | None

    @property
    def shares(self) -> tuple[Shares, ...]:
        """How the state of every stage lies."""
        return self.home.shares

    def ids(self, role: Role) -> list[int]:
        """The program's inputs of a role, in the order of the user's leaves and of their slices."""
        return [v for v, leaf in enumerate(self.home.graph.program.inputs) if leaf.role is role]

    def paths(self, role: Role) -> list[str]:
        """Their pytree paths."""
        return [self.home.graph.program.inputs[v].path for v in self.ids(role)]

    def slicings(self, role: Role) -> tuple[Slicing, ...]:
        """How each of the user's leaves of a role is given to the program."""
        return slicings_of(self.home.graph.program.leaves(role))

    def owners(self, role: Role) -> list[int]:
        """The stage that owns each of them."""
        return [self.home.table.owner[v] for v in self.ids(role)]

    def readers(self) -> Mapping[str, Sequence[int]]:
        """Path of an input -> the stages that hold or read it while training, ascending."""
        table, inputs = self.home.table, self.home.graph.program.inputs
        found = {
            inputs[v].path: [s.index for s in table.shapes if v in (*s.params, *s.held, *s.state)] or [owner]
            for v, owner in table.owner.items()
        }
        wholes: dict[str, set[int]] = {}  # another function may read a stacked leaf whole
        for leaf in inputs:
            if leaf.part is not None:
                wholes.setdefault(leaf.part.path, set()).update(found[leaf.path])
        return found | {path: sorted(stages) for path, stages in wholes.items()}

    def first_state(
        self, takes: Container[str], params: Any, *, frozen: Any, model_state: Any, rng: Any
    ) -> TrainState:
        """A state before the first step.

        Args:
            takes: the keywords of the user's function.
            params: a tree of arrays, or `init_fn(key) -> tree`, called with fold_in(rng, 0).
            frozen, model_state, rng: as given to `init`. Leaves of the three trees that are functions are
                called with fold_in(rng, 0) on the devices of their stage.
        """
        key = _init_key(rng)
        if _is_init(params):
            placed = self._made(params, key)
        else:
            placed = self._placed(params, Role.PARAM, key)
        first = self.meshes[0]
        return TrainState(
            params=placed,
            opt_state=None if self.cut is None else init_state(self.cut, self.shares, placed, move),
            model_state=self._placed(model_state, Role.MODEL_STATE, key) if "model_state" in takes else None,
            frozen=self._placed(frozen, Role.FROZEN, key) if "frozen" in takes else None,
            rng=place([jax.random.fold_in(rng, 1)], [None], first)[0] if "rng" in takes else None,
            step=place([jnp.int32(0)], [None], first)[0],
        )

    def _placed(self, tree: Any, role: Role, key: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        ids, inputs, slicings = self.ids(role), self.home.graph.program.inputs, self.slicings(role)
        sources = [(n, index) for n, slicing in enumerate(slicings) for index in slicing.indices()]

        def on_stage(shares: Shares, mine: Sequence[int]) -> Sequence[Any]:
            mesh = shares.mesh
            wanted = {n for n, _ in (sources[k] for k in mine)}
            here = place([key], [None], mesh)[0] if any(callable(leaves[n]) for n in wanted) else None
            given = {n: leaves[n](here) if callable(leaves[n]) else leaves[n] for n in sorted(wanted)}
            values = [part_of(given[n], slicings[n], index) for n, index in (sources[k] for k in mine)]
            dtypes = [inputs[ids[k]].aval.dtype for k in mine]
            cast = [_as_dtype(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]
            layouts = [shares.parameter(value.shape) if role is Role.PARAM else None for value in cast]
            return place(cast, layouts, mesh)

        return packed(treedef, slicings, self._by_stage(self.owners(role), on_stage))

    def _made(self, make: Callable[[Any], Any], key: Any) -> Any:
        """Make every stage's parameters on its own devices; XLA drops what a stage does not keep."""
        slicings, ids = self.slicings(Role.PARAM), self.ids(Role.PARAM)

        def on_stage(shares: Shares, mine: Sequence[int]) -> Sequence[Any]:
            shapes = [self.home.graph.program.inputs[ids[k]].aval.shape for k in mine]
            run = jax.jit(
                lambda x: [flat_parts(make(x), slicings)[k] for k in mine],
                out_shardings=[shares.on_mesh(shares.parameter(shape)) for shape in shapes],
            )
            return run(place([key], [None], shares.mesh)[0])

        structure = jax.tree.structure(jax.eval_shape(make, key))
        return packed(structure, slicings, self._by_stage(self.owners(Role.PARAM), on_stage))

    def _by_stage(
        self, owners: Sequence[int], make: Callable[[Shares, Sequence[int]], Sequence[Any]]
    ) -> list[Any]:
        """`make` called once a stage, for the positions of the leaves that it owns; all of them in order."""
        placed: list[Any] = [None] * len(owners)
        for stage, shares in enumerate(self.shares):
            mine = [k for k, owner in enumerate(owners) if owner == stage]
            for k, array in zip(mine, make(shares, mine), strict=True):
                placed[k] = array
        return placed

    def settled(self, state: TrainState) -> TrainState:
        """The state with what the user put in (host arrays from a checkpoint, say) on its stages."""
        assert self.cut is not None

        def laid(tree: Any, like: Any, name: str, slicings: Sequence[Slicing], lies: Lies) -> Any:
            check_like(tree, like, name)
            parts = [lies(*part) for part in enumerate(flat_parts(tree, slicings))]
            return packed(jax.tree.structure(tree), slicings, parts)

        def param(number: int, part: Any) -> Any:
            shares = self.shares[owners[number]]
            return settled(part, shares.mesh, shares.parameter(part.shape))

        cut = self.cut
        owners, shares_of = cut.param_owner, cut.shares_of(self.shares)
        places = [shares_of[place] for place in cut.state_place]
        return state.replace(
            params=laid(state.params, cut.params, "state.params", cut.param_slicing, param),
            opt_state=laid(
                state.opt_state,
                cut.state,
                "state.opt_state",
                cut.state_slicing,
                lambda number, part: at_rest(part, places[number]),
            ),
        )

    def groups(self, offloads: Sequence[bool]) -> list[tuple[int, ...] | None]:
        """For every parameter, which ones of its stage its optimizer state is fetched with: those that the
        same block reads alone, as the planner counts them. None where the stage does not offload.

        Args:
            offloads: per stage.
        """
        nodes, table = self.home.graph.nodes, self.home.table
        readers: dict[int, list[int]] = defaultdict(list)
        blocks = [block for stage in self.home.layout.stages for block in stage]
        for number, block in enumerate(blocks):
            for v in {v for n in block for v in nodes[n].inputs}:
                readers[v].append(number)
        return [
            (tuple(readers[v]) if len(readers[v]) == 1 else (-1, v)) if offloads[table.owner[v]] else None
            for v in self.ids(Role.PARAM)
        ]

    def runs_alone(self, prepared: Prepared) -> bool:
        """Whether a batch runs on all devices of the one stage there is, its state with it."""
        offloads = self.cut is not None and any(place.offload for place in self.cut.places)
        return prepared.fused is not None and prepared.layout.meshes == self.meshes and not offloads

    def gradients(self, prepared: Prepared, env: Mapping[Any, Any]) -> list[Any]:
        """Gradients, slice by slice, where their parameters live (a batch of another shape may be read
        elsewhere)."""
        inputs = prepared.graph.program.inputs
        ids = [v for v, leaf in enumerate(inputs) if leaf.role is Role.PARAM]
        if prepared.table.owner == self.home.table.owner and prepared.layout.meshes == self.meshes:
            return [env["grad", v] for v in ids]
        stages = dict(zip(self.paths(Role.PARAM), self.owners(Role.PARAM), strict=True))
        found = []
        for v in ids:
            grad, shares = env["grad", v], self.shares[stages.get(inputs[v].path, prepared.table.owner[v])]
            found.append(settled(grad, shares.mesh, shares.update(grad.shape)))
        return found

    def settled_gradients(self, grads: Any) -> list[Any]:
        """Gradients that a user brings, slice by slice, on the stages of their parameters."""
        assert self.cut is not None
        cut = self.cut
        check_like(grads, cut.params, "grads")
        found = []
        for part, stage in zip(flat_parts(grads, cut.param_slicing), cut.param_owner, strict=True):
            shares = self.shares[stage]
            placed = settled(part, shares.mesh, shares.update(part.shape))
            found.append(placed.astype(grad_dtype(part.dtype)))
        return found


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's update where parameters live, to be traced into a program of one stage."""

    at: Placement
    donate: bool

    def parts(self, grads: Any, state: Any, params: Any, loss: Any) -> tuple[list[Any], list[Any]]:
        """New parts of parameters and state."""
        assert self.at.cut is not None
        return update_parts(self.at.cut, self.at.shares, grads, state, params, move, loss=loss, donate=False)


def _as_dtype(value: Any, dtype: Any) -> Any:
    return value if getattr(value, "dtype", None) == dtype else jnp.asarray(value, dtype)
