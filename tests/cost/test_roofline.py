"""Kernels: what fuses, which bytes reach memory, and seconds on a roofline."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rannc_jax.cluster import DeviceSpec
from rannc_jax.contract import Remat
from rannc_jax.cost.flops import jaxpr_flops
from rannc_jax.cost.operations import Twins, gradients, open_jaxpr
from rannc_jax.cost.roofline import Kernels, rate
from rannc_jax.errors import CostError
from tests.cost.networks import shape

DEVICE = DeviceSpec(
    kind="test",
    platform="gpu",
    memory_bytes=2**30,
    flops_per_s={"float32": 1e12, "bfloat16": 4e12},
    bytes_per_s=1e11,
    launch_s=0.0,
)


def twins_of(fn, *args, rows=(4, 8)) -> Twins:
    """`fn` takes arguments whose dims that are None carry the rows."""

    def opened(count):
        avals = [shape(*(count if d is None else d for d in dims)) for dims in args]
        return open_jaxpr(jax.make_jaxpr(fn)(*avals).jaxpr)

    return Twins(opened(rows[0]), opened(rows[1]), rows)


def kernels_of(fn, *args, rows=(4, 8), wrt=()) -> Kernels:
    twins = twins_of(fn, *args, rows=rows)
    outputs = twins.first.outputs
    active = gradients(twins.first, set(wrt), set(outputs)) if wrt else ()
    return Kernels(twins, range(len(twins.first.operations)), outputs, active)


def test_an_elementwise_chain_is_one_kernel_that_reads_and_writes_once():
    kernels = kernels_of(lambda x, y: jnp.tanh(x * y + 1.0) * 2.0, (None, 100), (None, 100))
    assert len(kernels.operation) == 1
    assert kernels.nbytes(8) == 3 * 8 * 100 * 4


def test_a_reduction_takes_its_producers_in_and_ends_the_kernel():
    kernels = kernels_of(lambda x: (x * x + 1.0).sum(axis=1) * 2.0, (None, 1000))
    assert len(kernels.operation) == 2
    # Reads x, writes the sums; reads the sums, writes the result.
    assert kernels.nbytes(8) == 8 * 1000 * 4 + 3 * 8 * 4


def test_a_product_stands_alone():
    kernels = kernels_of(lambda x, w: jnp.sin(jnp.cos(x) @ w), (None, 64), (64, 32))
    assert len(kernels.operation) == 3
    wide, narrow, weight = 8 * 64 * 4, 8 * 32 * 4, 64 * 32 * 4
    assert kernels.nbytes(8) == 2 * wide + (wide + weight + narrow) + 2 * narrow


def test_views_move_nothing_and_do_not_part_what_fuses():
    plain = kernels_of(lambda x: jnp.sin(x) * 2.0, (None, 64))
    viewed = kernels_of(lambda x: jnp.sin(x).reshape(-1, 8, 8) * 2.0, (None, 64))
    assert viewed.nbytes(8) == plain.nbytes(8)
    assert len(viewed.operation) == 1


def test_cheap_work_is_repeated_in_its_readers_where_that_moves_fewer_bytes():
    # Softmax: exp is made in the sum's kernel and again in the quotient's.
    kernels = kernels_of(lambda x: jnp.exp(x) / jnp.exp(x).sum(axis=1, keepdims=True), (None, 1000))
    assert kernels.nbytes(8) == pytest.approx(3 * 8 * 1000 * 4, rel=0.01)


def test_what_leaves_the_group_is_written():
    fused = kernels_of(lambda x: jnp.sin(jnp.cos(x)), (None, 64))
    kept = kernels_of(lambda x: (jnp.cos(x), jnp.sin(jnp.cos(x))), (None, 64))
    assert kept.nbytes(8) > fused.nbytes(8)


def network(x, w1, w2):
    def body(carry, _):
        return jax.nn.relu(carry @ w2), None

    hidden = jax.nn.softmax(x @ w1)
    hidden, _ = jax.lax.scan(body, hidden, None, length=3)
    return jnp.sum(jnp.take(hidden, jnp.arange(3), axis=1) ** 2)


@pytest.mark.parametrize("rows", [6, 16, 100])
def test_prices_between_and_beyond_the_traces_equal_direct_prices(rows):
    shapes = ((None, 64), (64, 32), (32, 32))
    line = kernels_of(network, *shapes, wrt=(1, 2))
    direct = kernels_of(network, *shapes, rows=(rows, 2 * rows), wrt=(1, 2))
    assert line.flops(rows) == pytest.approx(direct.flops(rows))
    assert line.nbytes(rows) == pytest.approx(direct.nbytes(rows))
    assert line.forward_s(DEVICE, rows) == pytest.approx(direct.forward_s(DEVICE, rows))
    for remat in Remat:
        expected = direct.backward_s(DEVICE, rows, remat)
        assert line.backward_s(DEVICE, rows, remat) == pytest.approx(expected)


def test_time_is_the_larger_of_arithmetic_and_memory_plus_launches():
    kernels = kernels_of(lambda x, w: x @ w, (None, 512), (512, 512))
    rows = 4096
    assert kernels.forward_s(DEVICE, rows) == pytest.approx(2 * rows * 512 * 512 / 1e12)
    moved = (512 + 512) * 4 * 1 + 512 * 512 * 4
    assert kernels.forward_s(DEVICE, 1) == pytest.approx(moved / 1e11)


def test_a_scan_pays_for_every_turn():
    def loop(x, w, turns):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=turns)[0]

    once = kernels_of(lambda x, w: x @ w, (None, 512), (512, 512))
    many = kernels_of(lambda x, w: loop(x, w, 7), (None, 512), (512, 512))
    assert many.forward_s(DEVICE, 4096) == pytest.approx(7 * once.forward_s(DEVICE, 4096))


@pytest.mark.parametrize(("wrt", "factor"), [((0, 1), 2), ((1,), 1), ((0,), 1)])
def test_the_backward_of_a_product_costs_one_forward_for_each_gradient(wrt, factor):
    kernels = kernels_of(lambda x, w: x @ w, (None, 512), (512, 512), wrt=wrt)
    forward = kernels.forward_s(DEVICE, 4096)
    assert kernels.backward_s(DEVICE, 4096, Remat.SAVE_ALL) == pytest.approx(factor * forward)


def test_rematerialisation_repeats_what_its_mode_drops():
    def layer(x, w):
        return jnp.tanh(x @ w)

    kernels = kernels_of(layer, (None, 512), (512, 512), wrt=(0, 1))
    product = kernels_of(lambda x, w: x @ w, (None, 512), (512, 512)).forward_s(DEVICE, 4096)
    forward = kernels.forward_s(DEVICE, 4096)
    all_, matmuls, nothing = (kernels.backward_s(DEVICE, 4096, remat) for remat in Remat)
    assert matmuls - all_ == pytest.approx(forward - product)
    assert nothing - all_ == pytest.approx(forward)


def test_a_checkpoint_of_the_user_repeats_its_forward_under_every_mode():
    def layer(x, w):
        return jnp.tanh(x @ w)

    plain = kernels_of(layer, (None, 512), (512, 512), wrt=(0, 1))
    again = kernels_of(jax.checkpoint(layer), (None, 512), (512, 512), wrt=(0, 1))
    extra = again.backward_s(DEVICE, 64, Remat.SAVE_ALL) - plain.backward_s(DEVICE, 64, Remat.SAVE_ALL)
    assert extra == pytest.approx(plain.forward_s(DEVICE, 64))


def test_what_no_gradient_flows_through_has_no_backward():
    kernels = kernels_of(lambda x, w: jax.lax.stop_gradient(x @ w) * x, (None, 64), (64, 64), wrt=(1,))
    assert kernels.backward_s(DEVICE, 64, Remat.RECOMPUTE) == 0


def attention(query, key, value):
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", query, key))
    return jnp.einsum("bts,bsd->btd", weights, value)


def test_an_attention_with_its_own_derivative_is_one_kernel_without_scores_in_memory():
    fused = jax.custom_vjp(attention)
    fused.defvjp(lambda *qkv: (attention(*qkv), qkv), lambda qkv, g: (g, g, g))
    operand = (None, 256, 16)
    whole = kernels_of(fused, operand, operand, operand)
    parts = kernels_of(attention, operand, operand, operand)
    assert len(whole.operation) == 1
    direct = jax.make_jaxpr(attention)(*[shape(4, 256, 16)] * 3)
    assert whole.flops(4) == pytest.approx(jaxpr_flops(direct))
    assert whole.nbytes(4) == 4 * (4 * 256 * 16 * 4)
    assert parts.nbytes(4) > 10 * whole.nbytes(4)


def test_a_rate_that_is_missing_falls_back_to_a_wider_one_or_says_so():
    assert rate(DEVICE, "bfloat16") == 4e12
    assert rate(DEVICE, "tensorfloat32") == 1e12
    bare = DeviceSpec(kind="bare", platform="gpu", memory_bytes=99, bytes_per_s=1.0)
    with pytest.raises(CostError, match="'bare' has no arithmetic rate"):
        rate(bare, "float32")


def test_two_traces_of_different_work_are_refused():
    def by_size(x):
        return x * 2.0 if x.shape[0] > 4 else jnp.sin(x)

    with pytest.raises(CostError, match="two numbers of rows"):
        twins_of(by_size, (None, 4))


def test_kernels_stand_in_the_order_of_their_roots():
    kernels = kernels_of(lambda x, w: jax.nn.softmax(x @ w) @ w, (None, 64), (64, 64))
    assert np.all(np.diff(kernels.operation) > 0)


def test_the_efficiency_of_a_device_slows_its_convolutions_alone():
    def conv(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    slow, fast = (
        replace(DEVICE, launch_s=0.0, bytes_per_s=1e30, efficiency={"convolution": share})
        for share in (0.25, 1)
    )
    convolution = kernels_of(conv, (None, 8, 8, 16), (3, 3, 16, 16))
    product = kernels_of(lambda x, w: x @ w, (None, 64), (64, 64))
    assert convolution.forward_s(slow, 4) == pytest.approx(4 * convolution.forward_s(fast, 4))
    assert product.forward_s(slow, 4) == product.forward_s(fast, 4) > 0
