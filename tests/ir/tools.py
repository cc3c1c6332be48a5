"""Programs and graphs of small functions."""

from typing import Any

import jax
import jax.numpy as jnp

from rannc_jax.ir import prepare
from rannc_jax.ir.example import make_example, subject
from rannc_jax.ir.graph import Graph
from rannc_jax.ir.trace import Program, trace

F32 = jnp.float32


def shape(*dims: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def example_of(
    fn: Any, params: Any, batch: Any, *, is_loss: bool = True, takes: Any = None, **given: Any
) -> Any:
    who = subject(fn, takes, is_loss=is_loss)
    return who, make_example(who, params, batch, **given)


def program_of(fn: Any, params: Any, batch: Any, **given: Any) -> Program:
    return trace(*example_of(fn, params, batch, **given))


def graph_of(fn: Any, params: Any, batch: Any, **given: Any) -> Graph:
    return prepare(*example_of(fn, params, batch, **given))


def names(program: Program, equations: Any = None) -> list[str]:
    chosen = range(len(program.eqns)) if equations is None else equations
    return [program.eqns[e].primitive.name for e in chosen]


def node_names(graph: Graph) -> list[str]:
    return [name for node in graph.nodes for name in names(graph.program, node.equations)]


def two_layers(params: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ params["a"])
    return jnp.mean((h @ params["b"] - batch["y"]) ** 2)


PARAMS = {"a": shape(4, 5), "b": shape(5, 3)}
BATCH = {"x": shape(8, 4), "y": shape(8, 3)}
