"""Networks and losses of every everyday kind, and what the batch analysis has to say about each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rannc_jax.contract import LossOut, Weighted, coupled, separable
from rannc_jax.ir.batch import LossKind
from tests.ir.batch_tools import Case

ROWS, TIME, WIDTH, VOCAB = 6, 5, 8, 11
F32 = jnp.float32


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), F32)


def whole(*shape: int, high: int = VOCAB, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).integers(0, high, size=shape), jnp.int32)


X = normal(ROWS, WIDTH)
Y = normal(ROWS, 3, seed=1)
TOKENS = whole(ROWS, TIME)
LABELS = jnp.where(
    normal(ROWS, TIME, seed=3) > np.linspace(-2, 1, ROWS)[:, None].astype(np.float32), TOKENS, -100
)
IMAGES = normal(ROWS, 8, 8, 4)
MLP = {"w": normal(WIDTH, 7), "b": normal(7), "v": normal(7, 3)}


def mlp(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"]


def mlp_mse(params: Any, batch: Any) -> Any:
    return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)


def summed(params: Any, batch: Any) -> Any:
    return jnp.sum((mlp(params, batch["x"]) - batch["y"]) ** 2)


def regularised(params: Any, batch: Any) -> Any:
    return mlp_mse(params, batch) + 0.1 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def rows_over_count(params: Any, batch: Any) -> Any:
    return jnp.sum(jnp.sum((mlp(params, batch["x"]) - batch["y"]) ** 2, 1) / batch["x"].shape[0])


def torch_like_mean(params: Any, batch: Any) -> Any:
    return jnp.sum((mlp(params, batch["x"]) - batch["y"]) ** 2) * (1.0 / batch["y"].size)


XY = {"x": X, "y": Y}

TRANSFORMER = {
    "embed": normal(VOCAB, WIDTH),
    "qkv": 0.3 * normal(WIDTH, 3, 2, WIDTH // 2),
    "out": 0.3 * normal(2, WIDTH // 2, WIDTH),
    "norm": jnp.ones(WIDTH),
    "up": 0.3 * normal(WIDTH, 2 * WIDTH),
    "down": 0.3 * normal(2 * WIDTH, WIDTH),
}


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * scale


def attention(params: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("btd,dchk->cbthk", x, params["qkv"])
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(WIDTH // 2).astype(np.float32)
    scores = jnp.where(mask, scores, jnp.finfo(F32).min)
    return jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(scores), v, params["out"])


def dropout(key: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if key is None else jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0)


def block(params: Any, x: jax.Array, mask: jax.Array, key: jax.Array | None = None) -> jax.Array:
    x = x + dropout(key, attention(params, layer_norm(x, params["norm"]), mask))
    return x + jax.nn.gelu(layer_norm(x, params["norm"]) @ params["up"]) @ params["down"]


def transformer(params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
    x = params["embed"][batch["tokens"]] + jnp.sin(jnp.arange(TIME, dtype=F32))[:, None]
    mask = jnp.tril(jnp.ones((TIME, TIME), bool))[None, None] & (batch["tokens"] > 0)[:, None, None, :]
    return block(params, x, mask, key) @ params["embed"].T


def token_losses(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    valid = labels != -100
    safe = jnp.where(valid, labels, 0)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), safe[..., None], -1)[..., 0]
    return jnp.where(valid, -picked, 0.0), valid


def masked_ce(params: Any, batch: Any) -> Any:
    losses, valid = token_losses(transformer(params, batch), batch["labels"])
    return jnp.sum(losses) / jnp.sum(valid).astype(F32)


def masked_ce_guarded(params: Any, batch: Any) -> Any:
    losses, valid = token_losses(transformer(params, batch), batch["labels"])
    return jnp.sum(losses) / jnp.maximum(jnp.sum(valid.astype(F32)), 1.0)


def masked_ce_where(params: Any, batch: Any) -> Any:
    losses, valid = token_losses(transformer(params, batch), batch["labels"])
    count = jnp.sum(valid)
    return jnp.where(count > 0, jnp.sum(losses) / jnp.where(count > 0, count, 1).astype(F32), 0.0)


def masked_ce_normalised_weights(params: Any, batch: Any) -> Any:
    losses, valid = token_losses(transformer(params, batch), batch["labels"])
    weights = valid.astype(F32)
    return jnp.sum(losses * (weights / jnp.sum(weights)))


def masked_ce_mean_over_mean(params: Any, batch: Any) -> Any:
    losses, valid = token_losses(transformer(params, batch), batch["labels"])
    return jnp.mean(losses) / jnp.mean(valid.astype(F32))


def masked_ce_epsilon(params: Any, batch: Any) -> Any:
    losses, valid = token_losses(transformer(params, batch), batch["labels"])
    return jnp.sum(losses) / (jnp.sum(valid.astype(F32)) + 0.5)


def masked_ce_regularised(params: Any, batch: Any) -> Any:
    return masked_ce_guarded(params, batch) + 0.1 * jnp.sum(params["up"] ** 2)


def masked_ce_flat(params: Any, batch: Any) -> Any:
    logits = transformer(params, batch).reshape(-1, VOCAB)
    losses, valid = token_losses(logits, batch["labels"].reshape(-1))
    return jnp.sum(losses) / jnp.sum(valid).astype(F32)


def shifted_ce_one_hot(params: Any, batch: Any) -> Any:
    logits = transformer(params, batch)[:, :-1]
    target = jax.nn.one_hot(batch["tokens"][:, 1:], VOCAB)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * target, -1))


def mean_where(params: Any, batch: Any) -> Any:
    losses, valid = token_losses(transformer(params, batch), batch["labels"])
    return jnp.mean(losses, where=valid)


def users_weight(params: Any, batch: Any) -> Any:
    losses, valid = token_losses(transformer(params, batch), batch["labels"])
    count = jnp.sum(valid.astype(F32))
    return Weighted(jnp.sum(losses) / count, count)


def two_denominators(params: Any, batch: Any) -> Any:
    return masked_ce(params, batch) + jnp.mean(transformer(params, batch) ** 2)


def parameter_denominator(params: Any, batch: Any) -> Any:
    gates = jax.nn.sigmoid(mlp(params, batch["x"])[:, 0])
    return jnp.sum(gates * batch["y"][:, 0] ** 2) / jnp.sum(gates)


def classifier_by_arange(params: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(mlp(params, batch["x"]))
    return -jnp.mean(logits[jnp.arange(logits.shape[0]), batch["label"]])


def classifier_by_computed_arange(params: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(mlp(params, batch["x"]))
    rows = 0 + 1 * jnp.arange(logits.shape[0])
    return -jnp.mean(logits[rows, batch["label"]])


def last_token(params: Any, batch: Any) -> Any:
    hidden = transformer(params, batch)
    last = jnp.argmax(jnp.cumsum((batch["tokens"] > 0).astype(jnp.int32), -1), -1)
    return jnp.mean(hidden[jnp.arange(hidden.shape[0]), last] ** 2)


TEXT = {"tokens": TOKENS, "labels": LABELS}


def rnn_time_major(params: Any, batch: Any) -> Any:
    xs = jnp.swapaxes(batch["x"], 0, 1)
    start = jnp.zeros((xs.shape[1], 7))

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(x @ params["w"] + h @ params["u"])
        return h, h @ params["v"]

    _, ys = lax.scan(cell, start, xs)
    return jnp.mean((jnp.swapaxes(ys, 0, 1) - batch["y"]) ** 2)


def rnn_merged_time(params: Any, batch: Any) -> Any:
    xs = jnp.swapaxes(batch["x"], 0, 1)
    flat = (xs.reshape(-1, WIDTH) @ params["w"]).reshape(*xs.shape[:2], 7)
    return jnp.mean(jnp.tanh(flat) ** 2)


RNN = {"w": normal(WIDTH, 7), "u": normal(7, 7), "v": normal(7, 3)}
SEQUENCES = {"x": normal(ROWS, TIME, WIDTH), "y": normal(ROWS, TIME, 3)}


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_pool(params: Any, batch: Any) -> Any:
    x = jax.nn.relu(convolve(batch["image"], params["k"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(x.reshape(x.shape[0], -1) ** 2)


def conv_batch_norm(params: Any, batch: Any) -> Any:
    x = convolve(batch["image"], params["k"])
    mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    return jnp.mean(jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5)) ** 3)


def batch_norm_with_state(params: Any, batch: Any, *, model_state: Any) -> Any:
    x = convolve(batch["image"], params["k"])
    mean = jnp.mean(x, (0, 1, 2))
    var = jnp.maximum(jnp.mean(x**2, (0, 1, 2)) - mean**2, 0.0)
    loss = jnp.mean(jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5)) ** 3)
    new = {"mean": 0.9 * model_state["mean"] + 0.1 * mean, "var": 0.9 * model_state["var"] + 0.1 * var}
    return LossOut(loss, model_state=new)


def group_norm(params: Any, batch: Any) -> Any:
    x = convolve(batch["image"], params["k"])
    grouped = x.reshape(x.shape[0], 8, 8, 2, 3)
    mean = jnp.mean(grouped, (1, 2, 4), keepdims=True)
    var = jnp.var(grouped, (1, 2, 4), keepdims=True)
    return jnp.mean(jax.nn.relu(((grouped - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)) ** 3)


def pixel_shuffle(params: Any, batch: Any) -> Any:
    x = batch["image"]
    b, h, w, c = x.shape
    up = x.reshape(b, h, w, 2, 2, c // 4).transpose(0, 1, 3, 2, 4, 5).reshape(b, 2 * h, 2 * w, c // 4)
    return jnp.mean(convolve(up, params["k1"]) ** 2)


CNN = {"k": normal(3, 3, 4, 6), "k1": normal(3, 3, 1, 2)}
STATE = {"mean": jnp.zeros(6), "var": jnp.ones(6)}


def contrastive(params: Any, batch: Any) -> Any:
    a, b = mlp(params, batch["x"]), batch["y"]
    logits = a @ b.T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


def sorted_triplet(params: Any, batch: Any) -> Any:
    scores = jnp.sort(mlp(params, batch["x"])[:, 0])
    return jnp.mean(jax.nn.relu(scores[1:] - scores[:-1]) ** 2)


def root_mean_square(params: Any, batch: Any) -> Any:
    return jnp.sqrt(mlp_mse(params, batch))


def product_of_means(params: Any, batch: Any) -> Any:
    out = mlp(params, batch["x"])
    return jnp.mean(out[:, 0]) * jnp.mean(out[:, 1])


def log_sum_exp_over_batch(params: Any, batch: Any) -> Any:
    return jax.nn.logsumexp(mlp(params, batch["x"])[:, 0]) - jnp.log(batch["x"].shape[0] * jnp.ones(()))


def softmax_over_batch(params: Any, batch: Any) -> Any:
    return jnp.sum(jax.nn.softmax(mlp(params, batch["x"]), axis=0) * batch["y"])


def cumulative_over_batch(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.cumsum(mlp(params, batch["x"]), axis=0) ** 2)


def neighbours(params: Any, batch: Any) -> Any:
    out = mlp(params, batch["x"])
    return jnp.mean((out - jnp.roll(out, 1, axis=0)) ** 2)


def row_number_as_number(params: Any, batch: Any) -> Any:
    out = mlp(params, batch["x"])
    return jnp.mean(out * jnp.arange(out.shape[0], dtype=F32)[:, None])


def biased_divisor(params: Any, batch: Any) -> Any:
    return jnp.sum(mlp(params, batch["x"]) ** 2) / (batch["x"].shape[0] - 1)


def max_over_batch(params: Any, batch: Any) -> Any:
    out = mlp(params, batch["x"])
    return jnp.mean(out / jnp.max(jnp.abs(out)))


def sum_plus_mean(params: Any, batch: Any) -> Any:
    return summed(params, batch) + mlp_mse(params, batch)


def sum_regularised(params: Any, batch: Any) -> Any:
    return summed(params, batch) + jnp.sum(params["w"] ** 2)


def top_rows_only(params: Any, batch: Any) -> Any:
    return jnp.mean(mlp(params, batch["x"])[:2] ** 2)


def balance_loss(params: Any, batch: Any) -> Any:
    gates = jax.nn.softmax(mlp(params, batch["x"]))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 3)
    return mlp_mse(params, batch) + jnp.sum(jnp.mean(gates, 0) * jnp.mean(chosen, 0))


def experts(params: Any, batch: Any) -> Any:
    gates, which = lax.top_k(jax.nn.softmax(mlp(params, batch["x"])), 2)
    outs = jnp.einsum("bd,edf->bef", batch["x"], params["experts"])
    chosen = jnp.take_along_axis(outs, which[:, :, None], 1)
    return jnp.mean(jnp.sum(chosen * gates[..., None], 1) ** 2)


def embedding_sum(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.sum(params["embed"][batch["tokens"]], 1) ** 2)


def auxiliary(params: Any, batch: Any) -> Any:
    out = mlp(params, batch["x"])
    return mlp_mse(params, batch), {
        "out": out,
        "accuracy": jnp.mean((out > 0).astype(F32)),
        "n": jnp.sum(out > 0),
    }


def checkpointed(params: Any, batch: Any) -> Any:
    return jnp.mean((jax.checkpoint(mlp)(params, batch["x"]) - batch["y"]) ** 2)


@jax.custom_vjp
def _swish(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


_swish.defvjp(
    lambda x: (_swish(x), x),
    lambda x, g: (g * (jax.nn.sigmoid(x) + x * jax.nn.sigmoid(x) * (1 - jax.nn.sigmoid(x))),),
)


def custom_rule(params: Any, batch: Any) -> Any:
    return jnp.mean((_swish(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


@jax.custom_vjp
def _clipped_gradient(x: jax.Array) -> jax.Array:
    return x


_clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def nonlinear_backward(params: Any, batch: Any) -> Any:
    return jnp.mean((coupled(_clipped_gradient)(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


def stacked_layers(params: Any, batch: Any) -> Any:
    x, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])
    return jnp.mean(x**2)


def chosen_branch(params: Any, batch: Any) -> Any:
    x = lax.cond(params["b"][0] > 0, lambda x: x @ params["w"], lambda x: -x @ params["w"], batch["x"])
    return jnp.mean(x**2)


def branch_on_batch(params: Any, batch: Any) -> Any:
    out = mlp(params, batch["x"])
    return lax.cond(jnp.sum(out[:, 0]) > 0, lambda o: jnp.mean(o**2), lambda o: jnp.mean(jnp.abs(o)), out)


def mapped_rows(params: Any, batch: Any) -> Any:
    return jnp.mean(lax.map(lambda x: jnp.sort(jax.nn.softmax(x @ params["w"])), batch["x"]) ** 2)


def vmapped_rows(params: Any, batch: Any) -> Any:
    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum((mlp(params, x) - y) ** 2) * jnp.max(x)

    return jnp.mean(jax.vmap(one)(batch["x"], batch["y"]))


def chunked_over_time(params: Any, batch: Any) -> Any:
    def add(total: jax.Array, xy: Any) -> Any:
        x, y = xy
        return total + jnp.sum((x @ params["w"] @ params["v"] - y) ** 2), None

    xs = jnp.swapaxes(batch["x"], 0, 1), jnp.swapaxes(batch["y"], 0, 1)
    total, _ = lax.scan(add, jnp.zeros(()), xs)
    return total / batch["x"].shape[0]


def two_views(params: Any, batch: Any) -> Any:
    both = jnp.concatenate([batch["x"], batch["x"] * 2], 0)
    out = mlp(params, both)
    first, second = jnp.split(out, 2)
    return jnp.mean((first - second) ** 2)


def stacked_and_tiled(params: Any, batch: Any) -> Any:
    x = jnp.swapaxes(batch["x"], 0, 1)
    pair = jnp.stack([x, 2 * x]) + jnp.stack([x, x], -1).transpose(2, 0, 1)
    out = mlp(params, jnp.swapaxes(jnp.tile(pair, (1, 1, 2))[1], 0, 1))
    first, second = jnp.split(out, 2)
    return jnp.mean((first - 0.5 * second) ** 2)


def segment_counts(params: Any, batch: Any) -> Any:
    out = mlp(params, batch["x"])[:, 0]
    per_class = jnp.zeros(VOCAB).at[batch["tokens"][:, 0]].add(out)
    return jnp.sum(per_class * jnp.linspace(0.5, 1.5, VOCAB)) / batch["x"].shape[0]


def regrouped(params: Any, batch: Any) -> Any:
    def route(x: jax.Array) -> jax.Array:
        order = jnp.argsort(x[:, 0])
        return jnp.zeros_like(x).at[order].set(jnp.tanh(x[order]))

    return jnp.mean((separable(route)(batch["x"]) @ params["w"]) ** 2)


def regrouped_unmarked(params: Any, batch: Any) -> Any:
    order = jnp.argsort(batch["x"][:, 0])
    return jnp.mean((jnp.zeros_like(batch["x"]).at[order].set(batch["x"][order]) @ params["w"]) ** 2)


MASKED = {"x": X, "y": Y, "mask": jnp.asarray([1, 1, 1, 1, 0, 1], F32), "soft": jnp.linspace(0.01, 0.2, ROWS)}


def soft_mask_regularised(params: Any, batch: Any) -> Any:
    losses = jnp.sum((mlp(params, batch["x"]) - batch["y"]) ** 2, 1)
    ratio = jnp.sum(losses * batch["soft"]) / jnp.maximum(jnp.sum(batch["soft"]), 1.0)
    return ratio + jnp.sum(params["w"] ** 2)


def average_with_weights(params: Any, batch: Any) -> Any:
    losses = jnp.sum((mlp(params, batch["x"]) - batch["y"]) ** 2, 1)
    return jnp.average(losses, weights=batch["mask"])


def dot_weights(params: Any, batch: Any) -> Any:
    losses = jnp.sum((mlp(params, batch["x"]) - batch["y"]) ** 2, 1)
    return losses @ batch["mask"] / batch["mask"].sum()


def root_of_count(params: Any, batch: Any) -> Any:
    losses = jnp.sum((mlp(params, batch["x"]) - batch["y"]) ** 2, 1)
    return jnp.sum(losses * batch["mask"]) / jnp.sqrt(jnp.sum(batch["mask"]))


def constant_loss(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"] ** 2)


LABELLED = {"x": X, "label": whole(ROWS, high=3), "y": Y, "tokens": TOKENS}
MOE = {**MLP, "experts": normal(3, WIDTH, 4)}
W, M = LossKind.WEIGHTED, LossKind.MEAN_OF_MEANS


def _case(fn: Any, params: Any, batch: Any, **fields: Any) -> Case:
    return Case(fn=fn, params=params, batch=batch, **fields)


SEPARABLE = [
    _case(mlp_mse, MLP, XY),
    _case(summed, MLP, XY, kind=LossKind.SUM),
    _case(regularised, MLP, XY),
    _case(rows_over_count, MLP, XY, unspreadable=True),
    _case(torch_like_mean, MLP, XY),
    _case(masked_ce, TRANSFORMER, TEXT, kind=W),
    _case(masked_ce_guarded, TRANSFORMER, TEXT, kind=W),
    _case(masked_ce_where, TRANSFORMER, TEXT, kind=W),
    _case(masked_ce_normalised_weights, TRANSFORMER, TEXT, kind=W, unspreadable=True),
    _case(masked_ce_mean_over_mean, TRANSFORMER, TEXT, kind=W),
    _case(masked_ce_epsilon, TRANSFORMER, TEXT, kind=W),
    _case(masked_ce_regularised, TRANSFORMER, TEXT, kind=W),
    _case(masked_ce_flat, TRANSFORMER, TEXT, kind=W),
    _case(shifted_ce_one_hot, TRANSFORMER, TEXT),
    _case(mean_where, TRANSFORMER, TEXT, kind=W),
    _case(users_weight, TRANSFORMER, TEXT, kind=W),
    _case(classifier_by_arange, MLP, LABELLED),
    _case(classifier_by_computed_arange, MLP, LABELLED),
    _case(last_token, TRANSFORMER, TEXT),
    _case(rnn_time_major, RNN, SEQUENCES),
    _case(rnn_merged_time, RNN, SEQUENCES),
    _case(conv_pool, CNN, {"image": IMAGES}),
    _case(group_norm, CNN, {"image": IMAGES}),
    _case(pixel_shuffle, CNN, {"image": IMAGES}),
    _case(experts, MOE, XY),
    _case(embedding_sum, TRANSFORMER, TEXT),
    _case(auxiliary, MLP, XY),
    _case(checkpointed, MLP, XY),
    _case(custom_rule, MLP, XY),
    _case(stacked_layers, {"layers": 0.4 * normal(3, WIDTH, WIDTH)}, {"x": X}),
    _case(chosen_branch, MLP, XY),
    _case(mapped_rows, MLP, XY),
    _case(vmapped_rows, MLP, XY),
    _case(chunked_over_time, RNN, SEQUENCES),
    _case(two_views, MLP, XY),
    _case(stacked_and_tiled, MLP, XY),
    _case(segment_counts, MLP, LABELLED),
    _case(average_with_weights, MLP, MASKED, kind=W),
    _case(dot_weights, MLP, MASKED, kind=W),
    _case(root_of_count, MLP, MASKED, kind=W),
    _case(constant_loss, MLP, XY),
]

COUPLED = [
    _case(contrastive, MLP, XY),
    _case(nonlinear_backward, MLP, XY),
    _case(sorted_triplet, MLP, XY),
    _case(root_mean_square, MLP, XY),
    _case(product_of_means, MLP, XY),
    _case(log_sum_exp_over_batch, MLP, XY),
    _case(softmax_over_batch, MLP, XY),
    _case(cumulative_over_batch, MLP, XY),
    _case(neighbours, MLP, XY),
    _case(row_number_as_number, MLP, XY),
    _case(biased_divisor, MLP, XY),
    _case(max_over_batch, MLP, XY),
    _case(sum_plus_mean, MLP, XY),
    _case(sum_regularised, MLP, XY),
    _case(top_rows_only, MLP, XY),
    _case(balance_loss, MLP, XY),
    _case(branch_on_batch, MLP, XY),
]

STATISTICS = [
    _case(conv_batch_norm, CNN, {"image": IMAGES}),
    _case(batch_norm_with_state, CNN, {"image": IMAGES}, keywords={"model_state": STATE}),
]

INEXACT = [
    _case(two_denominators, TRANSFORMER, TEXT, kind=M),
    _case(parameter_denominator, MLP, XY, kind=M),
    _case(soft_mask_regularised, MLP, MASKED, kind=M),
]

MARKED = _case(regrouped, MLP, XY)
UNMARKED = _case(regrouped_unmarked, MLP, XY)
