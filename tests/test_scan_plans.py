"""Deep scanned networks are planned from shapes, in seconds, and cut between named layers."""

import re
import time

import jax
import jax.numpy as jnp
import optax

import rannc_jax
from rannc_jax import ClusterSpec, DeviceGroup
from rannc_jax.cost import device_preset, link_preset
from tests import scan_networks as networks

CPU = ClusterSpec(
    groups=(DeviceGroup(device=device_preset("cpu"), count_per_host=2),),
    intra_host=link_preset("host"),
    inter_host=link_preset("host"),
)
LAYERS, WIDTH, VOCABULARY = 96, 1024, 32000


def test_96_flax_layers_are_planned_for_32_devices_in_seconds():
    network = networks.Scanned(num_layers=LAYERS, width=WIDTH, vocabulary=VOCABULARY, dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((256, 128), jnp.int32)
    params = jax.eval_shape(network.init, jax.random.key(0), tokens)

    def loss_fn(p, b):
        return networks.next_token_loss(network.apply(p, b["x"]).astype(jnp.float32), b["y"])

    group = DeviceGroup(device=device_preset("v100"), count_per_host=8, hosts=4)
    cluster = ClusterSpec(
        groups=(group,), intra_host=link_preset("nvlink4"), inter_host=link_preset("net100g")
    )
    began = time.process_time()
    plan = rannc_jax.make_plan(
        loss_fn, params, {"x": tokens, "y": tokens}, optimizer=optax.adamw(1e-4), mesh=cluster
    )
    assert time.process_time() - began < 10
    assert len(plan.stages) > 1
    first = [plan.blocks[stage.blocks[0]].path for stage in plan.stages[1:]]
    assert all(re.match(r"Scanned/layers/\d+", path) for path in first)
    total = sum(leaf.size for leaf in jax.tree.leaves(params)) * 4
    assert sum(stage.memory_bytes["parameters"] for stage in plan.stages) == total


def test_a_plan_says_why_a_loop_is_not_cut():
    def loss_fn(p, b):
        def turn(h, x):
            return jnp.tanh(h @ p["w"] + x), None

        h, _ = jax.lax.scan(turn, b["x"][:, 0], jnp.moveaxis(b["x"], 1, 0))
        return jnp.mean((h @ p["out"]) ** 2)

    params = {"w": jnp.ones((8, 8)), "out": jnp.ones((8, 8))}
    plan = rannc_jax.make_plan(
        loss_fn, params, {"x": jnp.ones((4, 3, 8))}, optimizer=optax.sgd(0.1), mesh=CPU
    )
    (note,) = [note for note in plan.notes if "scan" in note]
    assert "is not cut: every turn reads the same parameters" in note
