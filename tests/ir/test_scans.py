"""Scans over layers are opened: which ones, into what, under which names, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from rannc_jax.contract import LossOut
from rannc_jax.ir import prepare
from rannc_jax.ir.checkpoints import CHECKPOINTS
from rannc_jax.ir.example import make_example, subject
from rannc_jax.ir.leaves import Slicing
from rannc_jax.ir.match import identity_print, program_print
from rannc_jax.ir.roles import Role
from rannc_jax.ir.trace import Program, module_path, same_structure, trace
from tests import scan_networks as networks
from tests.scan_networks import WIDTH, layer, normal

BATCH = networks.batch()
RNG = np.random.default_rng(3)
X = {"x": normal(RNG, 4, 3, WIDTH)}  # [rows, length, width]


def traced(fn, params, batch=BATCH, rows=None, **given) -> Program:
    who = subject(fn)
    return trace(who, make_example(who, params, batch, **given), rows)


def primitives(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in program.eqns]


def is_open(program: Program) -> bool:
    return "scan" not in primitives(program)


def parts(program: Program, role: Role, tree) -> list:
    pairs = zip(program.leaves(role), jax.tree.leaves(tree), strict=True)
    return [part for leaf, array in pairs for part in leaf.parts(array)]


def run(program: Program, params, batch=BATCH, **given) -> list:
    """The program's outputs, stacked ones joined."""
    trees = {Role.PARAM: params, Role.FROZEN: given.get("frozen"), Role.MODEL_STATE: given.get("model_state")}
    args = [part for role, tree in trees.items() for part in parts(program, role, tree)]
    args += jax.tree.leaves(batch) + jax.tree.leaves(given.get("rng"))
    flat = jex.jaxpr_as_fun(program.jaxpr)(*args)
    return [
        leaf.slicing.join([flat[k] for k in leaf.positions], lambda rows, dim: np.stack(rows, dim))
        for leaf in program.output_leaves()
    ]


def check_same(fn, params, batch=BATCH, **given) -> Program:
    """The opened program computes what the function does."""
    program = traced(fn, params, batch, **given)
    expected = jax.tree.leaves(fn(params, batch, **given))
    for got, wanted in zip(run(program, params, batch, **given), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=2e-6, atol=2e-6)
    return program


def stacked(*shape: int, layers: int = 3):
    return normal(RNG, layers, *shape)


def square(h):
    return jnp.mean(h * h)


# --- what is opened -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}, {"unroll": True, "reverse": True}])
def test_a_scan_over_layers_becomes_its_layers(options):
    params = networks.params(4)
    program = check_same(networks.plain(**options), params)
    assert is_open(program)
    paths = [module_path(eqn).split("/attention")[0] for eqn in program.eqns]
    order = [p for p in dict.fromkeys(paths) if p.startswith("layers/") and p.count("/") == 1]
    numbers = reversed(range(4)) if options.get("reverse") else range(4)
    assert order == [f"layers/{i}" for i in numbers]


def test_a_stacked_leaf_is_one_input_a_layer():
    program = traced(networks.plain(), networks.params(3))
    leaf = next(leaf for leaf in program.leaves(Role.PARAM) if leaf.path == "params['layers']['mlp']['up']")
    assert leaf.slicing == Slicing(dims=(0,), lengths=(3,))
    inputs = [program.inputs[v] for v in leaf.positions]
    assert [i.path for i in inputs] == [f"params['layers']['mlp']['up'][{k}]" for k in range(3)]
    assert {i.aval.shape for i in inputs} == {(WIDTH, 2 * WIDTH)}
    reads = {v for e in range(len(program.eqns)) for v in program.reads(e)}
    assert set(leaf.positions) <= reads


def test_every_layer_reads_its_own_slices_and_no_others():
    who, params = subject(networks.plain()), networks.params(3)
    graph = prepare(who, make_example(who, params, BATCH))
    for node in graph.nodes:
        layers = {
            graph.program.inputs[v].path[-2] for v in node.inputs if "layers" in graph.program.inputs[v].path
        }
        assert layers <= {node.path.split("/")[1]} if node.path.startswith("layers") else not layers


def test_a_checkpoint_around_the_body_stays_whole_in_every_layer():
    program = check_same(networks.plain(jax.checkpoint(layer)), networks.params(3))
    bodies = [eqn for eqn in program.eqns if eqn.primitive.name in ("checkpoint", "remat2")]
    assert [module_path(eqn) for eqn in bodies] == ["layers/0", "layers/1", "layers/2"]


def test_a_checkpoint_around_the_loop_goes_around_every_layer():
    @jax.checkpoint
    def network(p, x):
        h = jnp.sin(p["embed"][x])
        h, _ = jax.lax.scan(lambda h, q: (layer(q, h), None), h, p["layers"])
        return jnp.cos(h) @ p["embed"].T

    def fn(p, b):
        return networks.next_token_loss(network(p, b["x"]), b["y"])

    program = check_same(fn, networks.params(3))
    assert is_open(program)
    bodies = [module_path(eqn) for eqn in program.eqns if eqn.primitive.name in CHECKPOINTS]
    assert bodies == ["", "layers/0", "layers/1", "layers/2", ""]
    assert len([leaf for leaf in program.inputs if leaf.part is not None]) == 6 * 3


def test_a_checkpoint_without_layers_stays_as_it_is():
    def fn(params, batch):
        return jax.checkpoint(recurrent)(params, batch) + square(params["w"])

    program = check_same(fn, {"w": normal(RNG, WIDTH, WIDTH)}, X)
    assert len([name for name in primitives(program) if name in CHECKPOINTS]) == 1


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("remat", [False, True])
def test_flax_scans_are_opened_along_any_axis(axis, remat):
    fn, params = networks.linen(networks.Scanned(num_layers=3, axis=axis, remat=remat))
    program = check_same(fn, params)
    assert is_open(program)
    assert any(module_path(eqn).startswith("Scanned/layers/2") for eqn in program.eqns)
    leaf = next(leaf for leaf in program.leaves(Role.PARAM) if "layers" in leaf.path and "up" in leaf.path)
    assert leaf.slicing.dims == ((axis,) if "kernel" in leaf.path or axis == 0 else (1,))


def test_nnx_layers_are_opened():
    fn, params = networks.nnx_network(3)
    program = check_same(fn, params)
    assert is_open(program)
    assert any(module_path(eqn) == "layers/2" for eqn in program.eqns)


def test_layers_that_are_stacked_for_the_scan_are_read_one_by_one():
    params = networks.list_params(3)
    program = check_same(networks.stacked_inside, params)
    assert is_open(program)
    assert not {"stack", "concatenate"} & set(primitives(program)[: primitives(program).index("remat2")])
    assert all(leaf.part is None for leaf in program.inputs)


def test_casts_of_the_stack_become_casts_of_the_slices():
    def fn(params, batch):
        cast = (params["w"] * 0.5).astype(jnp.bfloat16)
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"].astype(jnp.bfloat16), cast)
        return square(h.astype(jnp.float32))

    program = check_same(fn, {"w": stacked(WIDTH, WIDTH)}, X)
    assert is_open(program)
    assert all(leaf.aval.shape == (WIDTH, WIDTH) for leaf in program.inputs if leaf.role is Role.PARAM)


def test_half_of_the_layers_in_each_of_two_scans():
    def fn(params, batch):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["w"][:2])
        h, _ = jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), h, params["w"][2:])
        return square(h)

    program = check_same(fn, {"w": stacked(WIDTH, WIDTH, layers=5)}, X)
    assert is_open(program)
    assert "concatenate" not in primitives(program)


def test_scans_in_scans_are_opened_level_by_level():
    def fn(params, batch):
        def group(h, ws):
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0], None

        return square(jax.lax.scan(group, batch["x"], params["groups"]["w"])[0])

    params = {"groups": {"w": normal(RNG, 2, 3, WIDTH, WIDTH), "b": normal(RNG, 2)}}
    program = check_same(fn, params, X)
    assert is_open(program)
    (_, leaf) = program.leaves(Role.PARAM)
    assert leaf.slicing == Slicing(dims=(0, 0), lengths=(2, 3))
    assert "groups/1/2" in {module_path(eqn) for eqn in program.eqns}


def test_what_layers_give_out_is_stacked_again():
    def fn(params, batch):
        def body(h, w):
            h = jnp.tanh(h @ w)
            return h, (jnp.mean(h * h), h[:, 0])

        h, (losses, firsts) = jax.lax.scan(body, batch["x"], params["w"], reverse=True)
        return square(h) + jnp.sum(losses), {"firsts": firsts, "losses": losses}

    program = check_same(fn, {"w": stacked(WIDTH, WIDTH)}, X)
    assert is_open(program)


def test_what_one_scan_gives_another_is_handed_over_layer_by_layer():
    def fn(params, batch):
        _, kept = jax.lax.scan(lambda h, w: (h @ w, h), batch["x"], params["down"])
        h, _ = jax.lax.scan(
            lambda h, pair: (jnp.tanh(h @ pair[0]) + pair[1], None),
            kept[-1],
            (params["up"], kept),
            reverse=True,
        )
        return square(h)

    program = check_same(fn, {"down": stacked(WIDTH, WIDTH), "up": stacked(WIDTH, WIDTH)}, X)
    assert is_open(program)
    assert "concatenate" not in primitives(program)


def test_keys_and_rows_among_the_slices():
    def fn(params, batch, rng):
        def body(h, xs):
            w, key, extra = xs
            return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), jnp.tanh(h @ w) + extra, 0), None

        keys = jax.random.split(rng, 3)
        extras = jnp.moveaxis(batch["x"], 1, 0)[:, :, None]
        return square(jax.lax.scan(body, batch["x"], (params["w"], keys, extras))[0])

    program = check_same(fn, {"w": stacked(WIDTH, WIDTH)}, X, rng=jax.random.key(0))
    assert is_open(program)


def test_a_penalty_on_the_whole_stack_adds_up_the_slices():
    def fn(params, batch):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["w"])
        return square(h) + 0.1 * jnp.sum(params["w"] ** 2)

    program = check_same(fn, {"w": stacked(WIDTH, WIDTH)}, X)
    assert is_open(program)
    assert "concatenate" not in primitives(program)


def test_whoever_looks_at_the_whole_stack_gets_it():
    def fn(params, batch):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["w"])
        return square(h) + jnp.sum(jnp.cumsum(params["w"], 0)[-1])

    assert is_open(check_same(fn, {"w": stacked(WIDTH, WIDTH)}, X))


def test_frozen_and_written_state_are_sliced_like_parameters():
    def fn(params, batch, frozen, model_state):
        def body(h, xs):
            w, f, s = xs
            return jnp.tanh(h @ (w + f)), s + 1

        h, new = jax.lax.scan(body, batch["x"], (params["w"], frozen["f"], model_state["s"]))
        return LossOut(loss=square(h), model_state={"s": new})

    given = {"frozen": {"f": stacked(WIDTH, WIDTH)}, "model_state": {"s": stacked()}}
    program = check_same(fn, {"w": stacked(WIDTH, WIDTH)}, X, **given)
    assert is_open(program)
    assert [len(leaf.positions) for leaf in program.leaves(Role.FROZEN)] == [3]
    assert [len(leaf.positions) for leaf in program.output_leaves()] == [1, 3]
    assert "concatenate" not in primitives(program)


def test_a_single_layer_is_opened_too():
    assert is_open(check_same(networks.plain(), networks.params(1)))


# --- what stays closed --------------------------------------------------------------------------


def closed(fn, params, batch=X, **given) -> None:
    program = check_same(fn, params, batch, **given)
    assert not is_open(program) or any("scan" in str(eqn.params) for eqn in program.eqns)
    assert all(leaf.part is None for leaf in program.inputs)


def recurrent(params, batch, extra=None):
    def turn(h, x):
        x, more = x
        h = jnp.tanh(h @ params["w"] + x + more)
        return h, h

    xs = jnp.moveaxis(batch["x"], 1, 0)
    more = jnp.zeros((xs.shape[0], 1)) if extra is None else extra
    return square(jax.lax.scan(turn, xs[0], (xs, more))[1])


def test_a_loop_over_time_stays_closed():
    closed(recurrent, {"w": normal(RNG, WIDTH, WIDTH)})


def test_a_loop_over_time_with_a_table_of_positions_stays_closed():
    # 3 turns slice 3 vectors of 16 numbers and share a matrix; also where the table outweighs the matrix.
    def fn(params, batch):
        return recurrent(params, batch, params["positions"])

    closed(fn, {"w": normal(RNG, WIDTH, WIDTH), "positions": normal(RNG, 3, WIDTH)})
    long = {"x": jnp.tile(X["x"], (1, 20, 1))}
    closed(fn, {"w": normal(RNG, WIDTH, WIDTH), "positions": normal(RNG, 60, WIDTH)}, long)


def test_layers_that_share_most_of_their_weights_stay_closed():
    def fn(params, batch):
        def body(h, ab):
            return jnp.tanh(h @ params["shared"] + h @ ab["a"] @ ab["b"]), None

        return square(jax.lax.scan(body, batch["x"], params["adapters"])[0])

    adapters = {"a": stacked(WIDTH, 1), "b": stacked(1, WIDTH)}
    closed(fn, {"shared": normal(RNG, WIDTH, WIDTH), "adapters": adapters})


def test_a_scan_in_a_custom_rule_stays_closed():
    @jax.custom_vjp
    def layers(w, x):
        return jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)[0]

    layers.defvjp(lambda w, x: (layers(w, x), (w, x)), lambda kept, g: (jnp.zeros_like(kept[0]), g))
    closed(lambda params, batch: square(layers(params["w"], batch["x"])), {"w": stacked(WIDTH, WIDTH)})


def test_a_loop_over_rows_of_the_batch_stays_closed():
    def fn(params, batch):
        return square(jax.lax.map(lambda x: jnp.tanh(x @ params["w"]), batch["x"]))

    closed(fn, {"w": normal(RNG, WIDTH, WIDTH)})


# --- every trace alike --------------------------------------------------------------------------


def test_traces_with_other_rows_are_opened_alike():
    params = networks.params(3)
    one, other = (traced(networks.plain(), params, rows=rows) for rows in (2, 6))
    assert same_structure(one, other)
    assert identity_print(one) == identity_print(other)
    assert program_print(one) == program_print(other)


def test_the_identity_speaks_of_the_users_leaves():
    def unrolled(params, batch):
        h = params["embed"][batch["x"]]
        for i in range(3):
            h = layer(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), h)
        return networks.next_token_loss(h @ params["embed"].T, batch["y"])

    params = networks.params(3)
    assert identity_print(traced(unrolled, params)) == identity_print(traced(networks.plain(), params))
