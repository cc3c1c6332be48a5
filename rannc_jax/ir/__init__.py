"""What the program is: traces, graphs, slices, derivatives, and where the batch goes."""

from rannc_jax.errors import TraceError, message
from rannc_jax.ir.batch import analyse
from rannc_jax.ir.example import Example, Subject
from rannc_jax.ir.graph import Graph, build_graph
from rannc_jax.ir.trace import Program, trace, warn_of_large_constants

__all__ = ["prepare"]


def prepare(who: Subject, example: Example) -> Graph:
    """Trace a function at two numbers of rows, analyse its batch and build its graph."""
    rows = max(example.rows, 2)  # with one row many functions take other paths than with more
    program = trace(who, example, rows)
    warn_of_large_constants(program)
    twin = _twin(who, example, rows)
    return build_graph(program, twin, analyse(program, twin))


def _twin(who: Subject, example: Example, rows: int) -> Program:
    """The trace with twice the rows.

    Raises:
        TraceError: the function works with no other number of rows.
    """
    try:
        return trace(who, example, 2 * rows)
    except TraceError:
        raise
    except Exception as error:
        reason = str(error).splitlines() or [type(error).__name__]
        raise TraceError(
            message(
                f"{who.name} can be traced with {rows} rows but not with {2 * rows}.",
                reason[0],
                hint="take the number of rows from the batch (x.shape[0]), and say by batch_dims= which "
                "leaves of the batch have no rows.",
            )
        ) from error
