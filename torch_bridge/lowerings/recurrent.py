"""LSTM, GRU and plain recurrent layers: one scan over time a layer and direction.

The input's projection is one product for all steps, outside the scan. Parameters come in torch's order:
for every layer, forward then backward, (weight_ih, weight_hh[, bias_ih, bias_hh][, weight_hr]).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings.matmul import contract, linear
from torch_bridge.lowerings.registry import lowering
from torch_bridge.tensors import accumulation

aten = torch.ops.aten
# (state, projected input of one step, weights of the layer) -> (new state, output of the step)
Cell = Callable[[tuple[Any, ...], Any, Sequence[Any]], tuple[tuple[Any, ...], Any]]


def _wide(x: Any) -> Any:
    """Half precision as float32: what recurrent kernels compute in between products."""
    return x.astype(accumulation(x.dtype))


def _recur(hidden: Any, weights: Sequence[Any]) -> Any:
    bias = weights[3] if len(weights) >= 4 else None
    return linear(hidden, weights[1], bias)


def _lstm_cell(state: tuple[Any, ...], projected: Any, weights: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    hidden, cell = state  # the cell is wide: it gathers over time
    gates = _wide(projected) + _wide(_recur(hidden, weights))
    enter, forget, candidate, leave = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
    hidden = (jax.nn.sigmoid(leave) * jnp.tanh(cell)).astype(hidden.dtype)
    if len(weights) in (3, 5):  # projections
        hidden = contract(hidden, weights[-1], (hidden.ndim - 1,), (1,))
    return (hidden, cell), hidden


def _gru_cell(state: tuple[Any, ...], projected: Any, weights: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    (hidden,) = state
    reset_x, update_x, new_x = jnp.split(_wide(projected), 3, -1)
    reset_h, update_h, new_h = jnp.split(_wide(_recur(hidden, weights)), 3, -1)
    update = jax.nn.sigmoid(update_x + update_h)
    new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
    hidden = ((1 - update) * new + update * _wide(hidden)).astype(hidden.dtype)
    return (hidden,), hidden


def _plain_cell(activation: Callable[[Any], Any]) -> Cell:
    def cell(state: tuple[Any, ...], projected: Any, weights: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        hidden = activation(_wide(projected) + _wide(_recur(state[0], weights))).astype(state[0].dtype)
        return (hidden,), hidden

    return cell


def _direction(
    cell: Cell, x: Any, state: tuple[Any, ...], weights: Sequence[Any], reverse: bool
) -> tuple[Any, Any]:
    """x `[time, ..., in]` -> (output `[time, ..., hidden]`, last state)."""
    projected = linear(x, weights[0], weights[2] if len(weights) >= 4 else None)
    # Half-precision weights are wide outside the scan, so that their gradients add up over time in float32.
    wide = [_wide(weight) for weight in weights]

    def step(state: tuple[Any, ...], projected: Any) -> tuple[tuple[Any, ...], Any]:
        return cell(state, projected, [weight.astype(x.dtype) for weight in wide])

    start = (state[0], *(_wide(part) for part in state[1:]))
    last, out = lax.scan(step, start, projected, reverse=reverse)
    return out, tuple(part.astype(x.dtype) for part in last)


def _layers(
    cell: Cell,
    x: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
    rng: Any,
) -> tuple[Any, ...]:
    """(output, *last states), each state `[layers * directions, ..., width]`."""
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    size = len(params) // (num_layers * directions)
    assert has_biases == (size >= 4), "torch's flat list of parameters"
    ends = []
    for layer in range(num_layers):
        if layer and rng is not None:
            kept = jax.random.bernoulli(jax.random.fold_in(rng, layer), 1.0 - dropout, x.shape)
            x = jnp.where(kept, x / (1.0 - dropout), jnp.zeros_like(x))
        outputs = []
        for reverse in range(directions):
            index = layer * directions + reverse
            start = tuple(state[index] for state in states)
            out, end = _direction(cell, x, start, params[index * size : (index + 1) * size], bool(reverse))
            outputs.append(out)
            ends.append(end)
        x = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, -1)
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    return (x, *(jnp.stack(parts) for parts in zip(*ends, strict=True)))


def _drops(
    _x: Any, _hx: Any, _params: Any, _biases: bool, layers: int, dropout: float, train: bool, *_: Any
) -> bool:
    return train and dropout > 0.0 and layers > 1


def _recurrent(cell: Cell) -> Callable[..., tuple[Any, ...]]:
    """torch's operator of a cell; `hx` is the state, or the states of an LSTM."""

    def layers(
        x: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        *,
        rng: Any = None,
    ) -> tuple[Any, ...]:
        del train  # in eval mode there is no key
        states = hx if isinstance(hx, tuple) else (hx,)
        return _layers(
            cell, x, states, params, has_biases, num_layers, dropout, bidirectional, batch_first, rng
        )

    return layers


lowering(aten.lstm.input, random=_drops)(_recurrent(_lstm_cell))
lowering(aten.gru.input, random=_drops)(_recurrent(_gru_cell))
lowering(aten.rnn_tanh.input, random=_drops)(_recurrent(_plain_cell(jnp.tanh)))
lowering(aten.rnn_relu.input, random=_drops)(_recurrent(_plain_cell(jax.nn.relu)))
