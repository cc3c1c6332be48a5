"""The step as one pure function on one device: what the pipeline must equal.

It calls the user's function on the same microbatches with the same keys and combines losses, gradients
and outputs by the same rule, without slices, replicas, schedules or the optimizer's cut.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rannc_jax.contract import LossOut
from rannc_jax.ir.batch import LossKind, RowLayout
from rannc_jax.ir.example import Subject
from rannc_jax.ir.roles import OutputKind, Role
from rannc_jax.ir.trace import as_loss_out, trace
from rannc_jax.runtime.engine import Prepared
from rannc_jax.runtime.feed import microbatch, part_weights
from rannc_jax.runtime.loss import combine_free, combine_rows, divisor_function
from rannc_jax.runtime.stacked import flat_parts, slicings_of
from rannc_jax.runtime.state import TrainState


def reference_step(
    who: Subject,
    optimizer: optax.GradientTransformation | None,
    prepared: Prepared,
    state: TrainState,
    batch: Any,
    rng: Any,
) -> tuple[TrainState, LossOut]:
    """One step over the whole batch on the default device."""
    state, batch = _on_one_device(state), jax.tree.map(jnp.asarray, batch)
    rule, layout = prepared.graph.info.loss, prepared.layout
    assert rule is not None
    assert optimizer is not None
    divisor = divisor_function(prepared.graph.program, rule)
    losses, weights, sums, auxes = [], [], None, []
    model_state = state.model_state
    key = None
    if "rng" in who.takes:
        key = jax.random.fold_in(state.rng, state.step) if rng is None else rng
    for i in range(layout.num_microbatches):
        part = _part(prepared, batch, i)
        keywords = {
            "rng": None if key is None else jax.random.fold_in(key, i),
            "model_state": model_state,
            "frozen": state.frozen,
        }

        def loss_of(params: Any, part: Any = part, keywords: Any = keywords) -> tuple[Any, LossOut]:
            out = as_loss_out(who(params, part, keywords))
            return out.loss, out

        (loss, out), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        weight = _weight(who, prepared, state.params, part, keywords, i)
        wide = jnp.promote_types(loss.dtype, jnp.float32)
        factor = jnp.ones((), wide) if rule.kind is LossKind.SUM else jnp.asarray(divisor(weight), wide)
        scaled = jax.tree.map(lambda g, f=factor, w=weight: jnp.where(w > 0, f * g, 0), grads)
        sums = scaled if sums is None else jax.tree.map(jnp.add, sums, scaled)
        losses.append(jnp.where(weight > 0, factor * loss, 0))
        weights.append(weight)
        auxes.append(out.aux)
        model_state = out.model_state
    total = jnp.sum(jnp.stack(weights))
    wide = losses[0].dtype
    scale = jnp.ones((), wide) if rule.kind is LossKind.SUM else 1 / jnp.asarray(divisor(total), wide)
    grads = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), sums, state.params)
    loss = sum(losses[1:], losses[0]) * scale
    extra = {"value": loss} if isinstance(optimizer, optax.GradientTransformationExtraArgs) else {}
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **extra)
    new = state.replace(
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        model_state=model_state,
        step=state.step + (1 if rng is None else 0),
    )
    shares = jnp.ones(len(weights)) if rule.kind is LossKind.SUM else jnp.stack(weights)
    aux = _combine(prepared, auxes, shares)
    weighted = any(leaf.kind is OutputKind.WEIGHT for leaf in prepared.graph.program.outputs)
    return new, LossOut(loss=loss, aux=aux, weight=total if weighted else None)


def _part(prepared: Prepared, batch: Any, i: int) -> Any:
    """Microbatch i without padding."""
    rows, total = prepared.layout.rows, prepared.layout.batch_rows
    leaves, tree = jax.tree.flatten(batch)
    parts = []
    for leaf, dim in zip(leaves, prepared.batch_dims, strict=True):
        part = microbatch(leaf, dim, i, rows)
        if dim is not None:
            part = jax.lax.slice_in_dim(part, 0, min(rows, total - i * rows), axis=dim)
        parts.append(part)
    return tree.unflatten(parts)


def _weight(who: Subject, prepared: Prepared, params: Any, part: Any, keywords: Any, i: int) -> Any:
    rule, layout = prepared.graph.info.loss, prepared.layout
    assert rule is not None
    if rule.kind is not LossKind.WEIGHTED or rule.weight is None:
        return jnp.float32(part_weights(layout.batch_rows, i, layout.rows, 1)[0])
    program = trace(who, prepared.example, _rows(part, prepared))
    given = {
        Role.PARAM: params,
        Role.FROZEN: keywords["frozen"],
        Role.MODEL_STATE: keywords["model_state"],
        Role.BATCH: part,
        Role.RNG: keywords["rng"],
    }
    arrays = [
        x
        for role in given
        if _takes(who, role)
        for x in flat_parts(given[role], slicings_of(program.leaves(role)))
    ]
    whole = program.jaxpr.jaxpr.replace(outvars=[program.vars[rule.weight]])
    (weight,) = jax.core.eval_jaxpr(whole, program.jaxpr.consts, *arrays, *program.const_values)
    return weight.astype(jnp.float32)


def _takes(who: Subject, role: Role) -> bool:
    return role in (Role.PARAM, Role.BATCH) or role.value in who.takes


def _rows(part: Any, prepared: Prepared) -> int:
    sizes = [
        leaf.shape[dim]
        for leaf, dim in zip(jax.tree.leaves(part), prepared.batch_dims, strict=True)
        if dim is not None
    ]
    return sizes[0] if sizes else prepared.layout.rows


def _combine(prepared: Prepared, auxes: list[Any], weights: Any) -> Any:
    info, program = prepared.graph.info, prepared.graph.program
    leaves = [jax.tree.leaves(aux) for aux in auxes]
    ids = [
        v
        for v, leaf in zip(program.output_ids(), program.outputs, strict=True)
        if leaf.kind is OutputKind.AUX
    ]
    joined = []
    for k, v in enumerate(ids):
        parts = [leaf[k] for leaf in leaves]
        layout = info.layouts[v] if v is not None else None
        joined.append(
            combine_rows(parts, layout, None)
            if isinstance(layout, RowLayout)
            else combine_free(parts, weights)
        )
    return jax.tree.structure(auxes[0]).unflatten(joined)


def _on_one_device(tree: Any) -> Any:
    device = jax.local_devices()[0]

    def leaf(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            return x  # under jit the caller has brought everything to one device
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jax.device_put(np.asarray(jax.random.key_data(x)), device)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.device_put(np.asarray(x), device)

    return jax.tree.map(leaf, tree)
