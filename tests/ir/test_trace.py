"""A traced function: flat equations, roles, paths, and value numbers that every trace shares."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rannc_jax import LossOut, TraceError, Weighted
from rannc_jax.ir import prepare
from rannc_jax.ir.example import make_example, subject
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.ir.trace import module_path, same_structure, source_line, trace
from tests.ir.tools import BATCH, PARAMS, example_of, names, program_of, shape, two_layers


def test_inputs_carry_roles_and_paths_in_order():
    def fn(params, batch, *, rng, model_state, frozen):
        key = jax.random.key_data(rng).sum().astype(jnp.float32)
        loss = two_layers(params, batch) + model_state["n"] + frozen[0] + key * 0
        return LossOut(loss=loss, model_state=model_state)

    program = program_of(
        fn, PARAMS, BATCH, rng=jax.random.key(0), model_state={"n": shape()}, frozen=[shape()]
    )
    assert [(leaf.path, leaf.role) for leaf in program.inputs] == [
        ("params['a']", Role.PARAM),
        ("params['b']", Role.PARAM),
        ("frozen[0]", Role.FROZEN),
        ("model_state['n']", Role.MODEL_STATE),
        ("batch['x']", Role.BATCH),
        ("batch['y']", Role.BATCH),
        ("rng", Role.RNG),
    ]
    assert [leaf.batch_dim for leaf in program.inputs] == [None] * 4 + [0, 0, None]
    assert [leaf.kind for leaf in program.outputs] == [OutputKind.LOSS, OutputKind.MODEL_STATE]


def test_values_are_numbered_alike_for_any_number_of_rows():
    who, example = example_of(two_layers, PARAMS, BATCH)
    one, other = trace(who, example, 2), trace(who, example, 6)
    assert same_structure(one, other)
    assert (one.rows, other.rows) == (2, 6)
    assert [v.aval.dtype for v in one.vars] == [v.aval.dtype for v in other.vars]
    assert not same_structure(one, program_of(lambda p, b: two_layers(p, b) * 2, PARAMS, BATCH))


def test_reads_and_writes_speak_in_value_numbers():
    program = program_of(lambda p, b: jnp.sum(b * p) + jnp.sum(b), shape(), shape(3))
    for e in range(len(program.eqns)):
        assert all(v < min(program.writes(e)) for v in program.reads(e))
    written = [v for e in range(len(program.eqns)) for v in program.writes(e)]
    assert written == list(range(len(program.inputs), len(program.vars)))
    assert program.output_ids() == (written[-1],)


def test_a_literal_output_has_no_number():
    program = program_of(lambda p, b: (jnp.sum(b * p), 2), shape(), shape(3))
    assert program.output_ids()[1] is None


def test_bytes_count_keys_by_their_words():
    program = program_of(
        lambda p, b, *, rng: jnp.sum(jax.random.normal(rng, b.shape) * p),
        shape(),
        shape(3),
        rng=jax.random.key(0),
    )
    rng = next(i for i, leaf in enumerate(program.inputs) if leaf.role is Role.RNG)
    assert program.nbytes(rng) == 8
    assert program.nbytes(0) == 4


@pytest.mark.parametrize(
    ("result", "kinds"),
    [
        (lambda loss: loss, "loss"),
        (lambda loss: (loss, {"a": loss}), "loss aux"),
        (lambda loss: Weighted(loss, 2.0), "loss weight"),
        (lambda loss: LossOut(loss=loss, aux=(loss, None)), "loss aux"),
        (lambda loss: LossOut(loss=loss, weight=loss), "loss weight"),
    ],
)
def test_every_form_of_result_is_understood(result, kinds):
    program = program_of(lambda p, b: result(two_layers(p, b)), PARAMS, BATCH)
    assert " ".join(leaf.kind.value for leaf in program.outputs) == kinds


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda loss, x: x, "float32[8, 4]"),
        (lambda loss, x: loss.astype(jnp.int32), "int32[]"),
        (lambda loss, x: {"loss": loss}, "dict"),
        (lambda loss, x: None, "NoneType"),
        (lambda loss, x: (loss, 1, 2), "tuple"),
        (lambda loss, x: (loss[None], {}), "tuple"),
        (lambda loss, x: LossOut(loss=x), "float32[8, 4]"),
        (lambda loss, x: "text", "str"),
    ],
)
def test_other_results_are_no_losses(result, got):
    with pytest.raises(TraceError, match="is not a floating scalar") as error:
        program_of(lambda p, b: result(two_layers(p, b), b["x"]), PARAMS, BATCH)
    assert f"got {got}" in str(error.value)


def test_what_is_no_array_cannot_be_an_output():
    with pytest.raises(TraceError, match=r"aux\['name'\]"):
        program_of(lambda p, b: (two_layers(p, b), {"name": "text"}), PARAMS, BATCH)


def test_small_constants_stay_inside_and_large_ones_become_inputs():
    small, large = np.arange(4, dtype=np.float32), np.ones((400, 4), np.float32)

    def fn(params, batch):
        return two_layers(params, {**batch, "x": batch["x"] + small + jnp.sum(jnp.asarray(large))})

    program = program_of(fn, PARAMS, BATCH)
    constants = [leaf for leaf in program.inputs if leaf.role is Role.CONST]
    assert [leaf.aval.shape for leaf in constants] == [(400, 4)]
    np.testing.assert_array_equal(program.const_values[0], large)
    assert all(np.size(c) <= 256 for c in program.jaxpr.consts)


def test_a_very_large_constant_is_named_once(monkeypatch):
    monkeypatch.setattr(sys.modules["rannc_jax.ir.trace"], "_CONST_WARN_BYTES", 5000)
    tables = [jnp.ones((400, 4)), jnp.ones((500, 4)), jnp.ones((300, 1))]

    def fn(params, batch):
        return two_layers(params, batch) + sum(jnp.sum(jnp.sin(t)) for t in tables)

    with pytest.warns(UserWarning, match="closes over") as warned:
        prepare(*example_of(fn, PARAMS, BATCH))
    assert len(warned) == 1
    text = str(warned[0].message)
    assert "float32[400, 4]" in text
    assert "float32[500, 4]" in text
    assert "300, 1" not in text
    assert "frozen=" in text


def test_equations_keep_their_scope_and_line_through_inlined_calls():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.tanh(x)

    def fn(params, batch):
        with jax.named_scope("outer"):
            h = inner(batch["x"] @ params["a"])
        return jnp.mean((h @ params["b"] - batch["y"]) ** 2)

    program = program_of(fn, PARAMS, BATCH)
    tanh = program.eqns[names(program).index("tanh")]
    assert module_path(tanh) == "outer/inner"
    assert "test_trace.py" in source_line(tanh)


@pytest.mark.parametrize("name", ["rng", "model_state", "frozen"])
def test_what_is_taken_and_not_given_is_named(name):
    with pytest.raises(TraceError, match=f"takes {name}, but none was given"):
        program_of(lambda p, b, **kwargs: two_layers(p, b), PARAMS, BATCH, takes=(name,))


def test_what_is_given_and_not_taken_is_left_out():
    program = program_of(two_layers, PARAMS, BATCH, frozen=shape(3), rng=jax.random.key(0))
    assert {leaf.role for leaf in program.inputs} == {Role.PARAM, Role.BATCH}


def test_batch_leaves_that_disagree_are_listed():
    with pytest.raises(TraceError, match="disagree about the number of rows") as error:
        program_of(two_layers, PARAMS, {"x": shape(8, 4), "y": shape(6, 3)})
    text = str(error.value)
    assert "batch['x']: (8, 4), dim 0 has 8 rows" in text
    assert "batch['y']: (6, 3), dim 0 has 6 rows" in text
    assert "batch_dims=" in text


def test_scalars_and_leaves_of_one_row_are_the_same_for_all_rows():
    _, example = example_of(two_layers, PARAMS, {**BATCH, "one": shape(1, 4), "scalar": shape()})
    assert example.rows == 8
    assert dict(zip(sorted(example.batch), example.batch_dims, strict=True)) == {
        "one": None,
        "scalar": None,
        "x": 0,
        "y": 0,
    }
    assert example.with_rows(2)["x"].shape == (2, 4)
    assert example.with_rows(2)["one"].shape == (1, 4)


def test_batch_dims_say_where_the_rows_are():
    who = subject(two_layers)
    batch = {"x": shape(4, 8), "y": shape(8, 3), "table": shape(5, 5)}
    example = make_example(who, PARAMS, batch, batch_dims={"x": 1, "y": 0, "table": None})
    assert example.rows == 8
    assert example.with_rows(2)["x"].shape == (4, 2)
    with pytest.raises(TraceError, match="batch_dims does not fit"):
        make_example(who, PARAMS, batch, batch_dims={"x": 1})
    with pytest.raises(TraceError, match=r"dim that is not there"):
        make_example(who, PARAMS, batch, batch_dims={"x": 1, "y": 2, "table": None})
    assert make_example(who, PARAMS, batch, batch_dims={"x": -1, "y": 0, "table": None}).rows == 8


def test_an_empty_batch_is_refused():
    with pytest.raises(TraceError, match="the batch is empty"):
        program_of(lambda p, b: jnp.sum(p), shape(3), {})


def test_a_function_tied_to_its_number_of_rows_is_refused():
    def fn(params, batch):
        return two_layers(params, {**batch, "x": batch["x"] + jnp.ones((8, 4))})

    with pytest.raises(TraceError, match="with 8 rows but not with 16") as error:
        prepare(*example_of(fn, PARAMS, BATCH))
    assert "batch_dims=" in str(error.value)
