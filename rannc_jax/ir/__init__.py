"""What the program is: traces, graphs, slices, derivatives, and where the batch goes."""

from rannc_jax.ir.batch import analyse
from rannc_jax.ir.example import Example, Subject
from rannc_jax.ir.graph import Graph, build_graph
from rannc_jax.ir.trace import trace

__all__ = ["prepare"]


def prepare(who: Subject, example: Example) -> Graph:
    """Trace a function at two numbers of rows, analyse its batch and build its graph."""
    rows = max(example.rows, 2)  # with one row many functions take other paths than with more
    program = trace(who, example, rows)
    twin = trace(who, example, 2 * rows)
    return build_graph(program, twin, analyse(program, twin))
