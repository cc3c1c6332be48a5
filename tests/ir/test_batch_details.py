"""What the batch analysis says besides the rule: masks, random draws, marks, guesses, places, mistakes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rannc_jax.contract import LossOut
from rannc_jax.errors import TraceError
from rannc_jax.ir.batch import CouplingKind, Dependence, LossKind, RowLayout
from rannc_jax.ir.rows import random_rows_hook, row_mask_hook
from tests.ir import batch_zoo as zoo
from tests.ir.batch_tools import Case, evaluated, look

pytestmark = pytest.mark.filterwarnings("ignore:core.Jaxpr is missing a DebugInfo:DeprecationWarning")

KEY = jax.random.key(11)
KEYED = {"rng": KEY}


def noisy(params: Any, batch: Any, *, rng: Any) -> Any:
    hidden = zoo.dropout(rng, zoo.mlp(params, batch["x"]))
    noise = jax.random.normal(jax.random.fold_in(rng, 1), (hidden.shape[0] * 2, 3)).reshape(-1, 2, 3)
    return jnp.mean((hidden + noise[:, 0] - batch["y"]) ** 2)


def noisy_time_major(params: Any, batch: Any, *, rng: Any) -> Any:
    flat = jnp.swapaxes(batch["x"], 0, 1).reshape(-1, zoo.WIDTH)
    return jnp.mean(zoo.dropout(rng, flat @ params["w"]) ** 2)


def noisy_batch_major(params: Any, batch: Any, *, rng: Any) -> Any:
    return jnp.mean(zoo.dropout(rng, batch["x"].reshape(-1, zoo.WIDTH) @ params["w"]) ** 2)


def keyed_rows(params: Any, batch: Any, *, rng: Any) -> Any:
    keys = jax.random.split(rng, batch["x"].shape[0])
    noise = jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
    return jnp.mean((zoo.mlp(params, batch["x"]) + noise) ** 2)


def shuffled_rows(params: Any, batch: Any, *, rng: Any) -> Any:
    order = jax.random.permutation(rng, batch["x"].shape[0])
    return jnp.mean(zoo.mlp(params, 0.7 * batch["x"] + 0.3 * batch["x"][order]) ** 2)


def noisy_scan(params: Any, batch: Any, *, rng: Any) -> Any:
    def layer(h: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        return zoo.dropout(key, jnp.tanh(h)), None

    hidden, _ = jax.lax.scan(layer, batch["x"], jax.random.split(rng, 3))
    return jnp.mean((hidden @ params["w"]) ** 2)


def numbered_keys(params: Any, batch: Any, *, rng: Any) -> Any:
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(batch["x"].shape[0]))
    noise = jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
    return jnp.mean((zoo.mlp(params, batch["x"]) + noise) ** 2)


SEQUENCE = ({"w": zoo.RNN["w"]}, zoo.SEQUENCES)


@pytest.mark.parametrize(
    ("fn", "arguments", "layouts"),
    [
        (noisy, (zoo.MLP, zoo.XY), {RowLayout(0), RowLayout(0, 1, 2)}),
        (noisy_time_major, SEQUENCE, {RowLayout(0, zoo.TIME, 1)}),
        (noisy_batch_major, SEQUENCE, {RowLayout(0, 1, zoo.TIME)}),
        (keyed_rows, (zoo.MLP, zoo.XY), {RowLayout(0)}),
    ],
)
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_draw_what_the_whole_draws(fn: Any, arguments: Any, layouts: Any, parts: int) -> None:
    params, batch = arguments
    program, info = look(Case(fn=fn, params=params, batch=batch, keywords=KEYED))
    assert info.couplings == ()
    assert info.unspreadable == ()
    assert set(info.random.values()) == layouts
    rows = program.rows // parts
    losses = []
    for part in range(parts):
        own = jax.tree.map(lambda x, part=part: x[part * rows : (part + 1) * rows], batch)
        small, _ = look(Case(fn=fn, params=params, batch=own, keywords=KEYED))
        hooks = {e: random_rows_hook(at, rows, parts, jnp.int32(part)) for e, at in info.random.items()}
        values = evaluated(small, jax.tree.leaves((params, own, KEY)), hooks)
        losses.append(values[small.output_ids()[0]])
    np.testing.assert_allclose(np.mean(losses), fn(params, batch, rng=KEY), rtol=1e-5)


@pytest.mark.parametrize("fn", [shuffled_rows, noisy_scan, numbered_keys])
def test_draws_that_cannot_be_made_row_by_row_are_named(fn: Any) -> None:
    program, info = look(Case(fn=fn, params=zoo.MLP, batch=zoo.XY, keywords=KEYED))
    assert info.couplings == ()
    assert info.unspreadable
    assert all(program.eqns[e] for e in info.unspreadable)


@pytest.mark.parametrize("name", ["mlp_mse", "masked_ce_guarded", "segment_counts", "dot_weights", "summed"])
def test_rows_of_padding_stay_out_of_the_loss(name: str) -> None:
    case = next(c for c in zoo.SEPARABLE if c.fn.__name__ == name)
    program, info = look(case)
    assert info.row_masks
    assert info.loss is not None
    keep = program.rows - 2
    mean = info.loss.kind is LossKind.MEAN
    scale = jnp.float32(program.rows / keep) if mean else None
    valid = jnp.arange(program.rows) < keep
    hooks = {m.equation: row_mask_hook(m, valid, scale) for m in info.row_masks}
    spoilt = jax.tree.map(lambda x: x.at[keep:].set(3), case.batch)
    values = evaluated(program, jax.tree.leaves((case.params, spoilt)), hooks)
    expected = case.fn(case.params, jax.tree.map(lambda x: x[:keep], case.batch))
    np.testing.assert_allclose(values[program.output_ids()[0]], expected, rtol=1e-5)


def test_the_mark_makes_regrouped_rows_separable_and_only_the_mark() -> None:
    _, marked = look(zoo.MARKED)
    _, unmarked = look(zoo.UNMARKED)
    assert marked.couplings == ()
    assert [c.primitive for c in unmarked.couplings] == ["sort"]


def test_a_coupling_names_module_and_line() -> None:
    def fn(params: Any, batch: Any) -> Any:
        with jax.named_scope("encoder"), jax.named_scope("mixer"):
            out = batch["x"] @ batch["x"].T
        return jnp.mean(out @ batch["x"] @ params["w"])

    _, info = look(Case(fn=fn, params=zoo.MLP, batch=zoo.XY))
    (coupling,) = info.couplings
    assert coupling.path == "encoder/mixer"
    assert "test_batch_details.py" in coupling.source
    assert coupling.primitive == "dot_general"


def test_a_primitive_without_a_rule_is_taken_for_coupled_by_name() -> None:
    def fn(params: Any, batch: Any) -> Any:
        groups = jnp.full((1,), batch["x"].shape[0], jnp.int32)
        return jnp.mean(jax.lax.ragged_dot(batch["x"], params["w"][None], groups))

    _, info = look(Case(fn=fn, params=zoo.MLP, batch=zoo.XY))
    assert [c.kind for c in info.couplings] == [CouplingKind.OTHER]
    assert info.couplings[0].primitive.startswith("ragged_dot")


def test_layouts_and_dependence_of_values() -> None:
    program, info = look(next(c for c in zoo.SEPARABLE if c.fn is zoo.rnn_merged_time))
    by_name = {e.primitive.name: program.value_ids[e.outvars[0]] for e in program.eqns}
    merged = by_name["dot_general"]
    assert info.layouts[merged] == RowLayout(0, zoo.TIME, 1)
    assert not info.layouts[merged].contiguous
    assert info.dependence[merged] is Dependence.ROWS
    assert info.dependence[by_name["reduce_sum"]] is Dependence.REDUCED
    assert info.dependence[0] is Dependence.FREE


def test_sums_and_means_among_the_outputs_are_told() -> None:
    program, info = look(next(c for c in zoo.SEPARABLE if c.fn is zoo.auxiliary))
    found = {
        leaf.path: info.reductions.get(i)
        for leaf, i in zip(program.outputs, program.output_ids(), strict=True)
    }
    assert found == {"loss": "mean", "aux['accuracy']": "mean", "aux['n']": "sum", "aux['out']": None}


def test_statistics_that_only_reach_the_model_state_are_told() -> None:
    def fn(params: Any, batch: Any, *, model_state: Any) -> Any:
        out = zoo.mlp(params, batch["x"])
        return LossOut(jnp.mean(out**2), model_state=0.9 * model_state + 0.1 * jnp.mean(out, 0))

    case = Case(fn=fn, params=zoo.MLP, batch=zoo.XY, keywords={"model_state": jnp.zeros(3)})
    _, info = look(case)
    assert [(c.kind, c.primitive) for c in info.couplings] == [(CouplingKind.BATCH_STATISTICS, "reduce_sum")]


def test_counts_kept_in_the_model_state_are_not_statistics() -> None:
    def fn(params: Any, batch: Any, *, model_state: Any) -> Any:
        out = zoo.mlp(params, batch["x"])
        return LossOut(jnp.mean(out**2), model_state=model_state + jnp.sum(out, 0))

    case = Case(fn=fn, params=zoo.MLP, batch=zoo.XY, keywords={"model_state": jnp.zeros(3)})
    _, info = look(case)
    assert [c.kind for c in info.couplings] == [CouplingKind.OTHER]


def test_a_function_that_looks_at_the_number_of_rows_is_refused() -> None:
    def fn(params: Any, batch: Any) -> Any:
        out = zoo.mlp(params, batch["x"])
        return jnp.mean(jnp.tanh(out) if out.shape[0] > zoo.ROWS else jnp.sin(out))

    with pytest.raises(TraceError, match="different work for different numbers of batch rows"):
        look(Case(fn=fn, params=zoo.MLP, batch=zoo.XY))
