"""Plans for networks where a person knows the answer: data parallel, fully sharded, a pipeline."""

import jax
import jax.numpy as jnp
import optax
import pytest

import rannc_jax

NVLINK = {
    "version": 1,
    "devices": [{"kind": "h200", "count_per_host": 8}],
    "links": {"intra_host": {"kind": "nvlink4"}},
}
SLOW = {
    "version": 1,
    "devices": [{"kind": "a100", "hosts": 4, "count_per_host": 1}],
    "links": {"inter_host": {"gbit_per_s": 10.0, "latency_us": 50.0}},
}
SMALL = {
    "version": 1,
    "devices": [{"kind": "t4", "count_per_host": 8}],
    "links": {"intra_host": {"kind": "pcie3"}},
}


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def layer(width):
    return {
        "qkv": shape(width, 3 * width),
        "out": shape(width, width),
        "up": shape(width, 4 * width),
        "down": shape(4 * width, width),
    }


def transformer(x, layers):
    for index, weights in enumerate(layers):
        with jax.named_scope(f"layers/{index}"):
            weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
            hidden = x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)
            heads = (*x.shape[:2], x.shape[-1] // 64, 64)
            query, key, value = (part.reshape(heads) for part in jnp.split(hidden @ weights["qkv"], 3, -1))
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            x = x + mixed.reshape(x.shape) @ weights["out"]
            x = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    return x


def gpt_loss(params, batch):
    x = transformer(params["embed"][batch["ids"]].astype(jnp.bfloat16), params["layers"])
    logits = (x @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def gpt(layers, width, vocabulary=32_000):
    return {
        "embed": shape(vocabulary, width),
        "layers": [layer(width) for _ in range(layers)],
        "head": shape(width, vocabulary),
    }


def tokens(rows, length):
    return {name: shape(rows, length, dtype=jnp.int32) for name in ("ids", "labels")}


def contrastive_loss(params, batch):
    """Every row against every other of the batch: rows see each other."""
    ends = transformer(batch.astype(jnp.bfloat16), params).mean(1)
    scores = (ends @ ends.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(scores.shape[0])).mean()


def plan(loss_fn, params, batch, mesh, **settings):
    return rannc_jax.make_plan(
        loss_fn, params, batch, optimizer=optax.adamw(1e-3), mesh=mesh, **{"runnable": False, **settings}
    )


def test_a_small_model_on_fast_links_is_data_parallel():
    params = gpt(12, 768)
    assert 1.2e8 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 1.4e8
    found = plan(gpt_loss, params, tokens(64, 1024), NVLINK)
    assert [stage.devices for stage in found.stages] == [tuple(range(8))]
    assert found.explain().startswith("data parallel over 8 devices: step ")
    runs = plan(gpt_loss, params, tokens(64, 1024), NVLINK, runnable=True)
    assert (runs.num_stages, runs.stages[0].sharding.value) == (1, "replicated")


def test_a_model_that_just_fits_fully_sharded_is_fully_sharded():
    width = 12_288
    found = plan(contrastive_loss, [layer(width) for _ in range(16)], shape(256, 512, width), NVLINK)
    assert found.explain().startswith("fully sharded data parallel (FSDP) over 8 devices: step ")
    said = found.explain()
    assert "memory: state is sharded over replicas (fsdp)" in said
    assert "1 stage x 8, 1 microbatch, 1f1b needs " in said


@pytest.mark.parametrize(
    "params, batch, mesh",
    [(gpt(8, 4096), tokens(64, 512), SLOW), (gpt(24, 2048), tokens(64, 512), SMALL)],
    ids=["slow links", "small devices"],
)
def test_a_pipeline_appears_where_links_are_slow_or_memory_is_short(params, batch, mesh):
    found = plan(gpt_loss, params, batch, mesh)
    assert found.num_stages > 1
    assert found.explain().startswith("a pipeline of ")
