"""Work of one equation: operations, bytes read and written, and how it behaves under fusion.

The words: `Work` is what one equation without a body costs; `bodies` names the jaxprs of an equation
that has some (scan, cond, jit, custom_vjp, ...) and how often each runs; `equation_flops` adds both up
recursively. Elementwise operations count one an element, transcendental ones `TRANSCENDENTAL_FLOPS`.
A primitive that is not in the tables is priced by its size; `warn_of_unknown` names them all.
"""

import enum
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from rannc_jax.cost.primitives import (
    ARITHMETIC,
    ATTENTION,
    COLLECTIVES,
    CONVOLUTIONS,
    CUMULATIVE,
    MATMULS,
    MOVES,
    RANDOM,
    REDUCTIONS,
    SCATTERS,
    SLICES,
    TRANSCENDENTAL,
    TRANSPARENT,
    VIEWS,
    WINDOWS,
)
from rannc_jax.ir.platform import readable_branches
from rannc_jax.ir.trace import aval_bytes

TRANSCENDENTAL_FLOPS = 8
"""exp, tanh and their kind take about this many multiply-add slots on GPU vector units (PTX lowering)."""

RANDOM_FLOPS = 60
"""Integer operations of one threefry2x32 word: 20 rounds of add, rotate, xor (Salmon et al., SC 2011)."""


class Fusion(enum.Enum):
    """How XLA treats an equation when it forms kernels."""

    VIEW = "view"  # only a change of shape: no kernel at all if nothing else is in it
    LOOP = "loop"  # fuses with producers and into consumers
    REDUCE = "reduce"  # fuses its producers, ends the kernel
    WHOLE = "whole"  # a kernel of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one equation without a body costs, run once.

    Args:
        flops: operations.
        unit: dtype name whose matrix rate applies, "" for vector work.
        reads: bytes read of each operand, in operand order.
        writes: bytes written to each output.
        fusion: see `Fusion`.
    """

    flops: float
    unit: str = ""
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fusion: Fusion


@dataclass(frozen=True, slots=True)
class Body:
    """A jaxpr inside an equation and how often it runs."""

    jaxpr: jex.Jaxpr
    times: int = 1


# Cubic work of n x n factorizations: leading terms of Golub and Van Loan, Matrix Computations, 4th ed.
_FACTOR_FLOPS = {
    "cholesky": 1 / 3,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "geqrf": 4 / 3,
    "householder_product": 4 / 3,
    "eigh": 9.0,
    "svd": 22.0,
    "eig": 25.0,
    "schur": 25.0,
    "tridiagonal_solve": 0.0,
    "triangular_solve": 1.0,
    "cholesky_update": 0.0,
    "hessenberg": 10 / 3,
    "tridiagonal": 4 / 3,
    "geqp3": 4 / 3,
    "ormqr": 4.0,
}

_unknown: dict[str, bool] = {}
"""Primitives without a rule that were met, and whether that was said."""

_WHILE = "while"


def work(eqn: jex.JaxprEqn) -> Work:
    """What one equation costs. Equations with bodies are priced at their edges only: see `bodies`."""
    name = eqn.primitive.name
    reads = tuple(_bytes(a) for a in eqn.invars)
    writes = tuple(_bytes(v) for v in eqn.outvars)
    size = max((_size(v) for v in eqn.outvars), default=0)
    in_size = max((_size(a) for a in eqn.invars), default=0)

    def of(flops: float, fusion: Fusion, unit: str = "", reads: tuple[int, ...] = reads) -> Work:
        return Work(flops=flops, unit=unit, reads=reads, writes=writes, fusion=fusion)

    if name in VIEWS:
        return of(0, Fusion.VIEW)
    if name == "transpose" and len(eqn.params["permutation"]) == 2:
        return of(0, Fusion.VIEW)  # products take either layout of a matrix
    if name in MOVES:
        return of(0, Fusion.LOOP)
    if name in ARITHMETIC:
        return of(size * _arithmetic_flops(eqn), Fusion.LOOP)
    if name in TRANSCENDENTAL:
        return of(size * TRANSCENDENTAL_FLOPS, Fusion.LOOP)
    if name in REDUCTIONS:
        return of(in_size, Fusion.REDUCE)
    if name in MATMULS:
        return of(_matmul_flops(eqn), Fusion.WHOLE, matmul_unit(eqn))
    if name in CONVOLUTIONS:
        return of(_convolution_flops(eqn), Fusion.WHOLE, matmul_unit(eqn))
    if name in SLICES:
        picked = (sum(writes), *reads[1:])
        return of(0, Fusion.WHOLE if name == "gather" else Fusion.LOOP, reads=picked)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(eqn, of)
    if name in _FACTOR_FLOPS:
        return of(_factor_flops(eqn), Fusion.WHOLE)
    if bodies(eqn):
        return of(0, Fusion.WHOLE)
    _unknown.setdefault(name, False)
    return of(size, Fusion.WHOLE)


def warn_of_unknown() -> None:
    """Say once which primitives were met that have no rule.

    Warns:
        UserWarning: one for all of them; another where a while loop's turns are not known.
    """
    fresh = [name for name, said in _unknown.items() if not said]
    _unknown.update(dict.fromkeys(fresh, True))
    names = [name for name in fresh if name != _WHILE]
    if names:
        warnings.warn(
            f"no cost rule for {', '.join(sorted(names))}: priced by size. Measured costs "
            '(costs="measured") know better.',
            stacklevel=3,
        )
    if _WHILE in fresh:
        warnings.warn("a while loop has no known number of turns; its cost counts once.", stacklevel=3)


def bodies(eqn: jex.JaxprEqn) -> tuple[Body, ...]:
    """The jaxprs inside an equation; of a cond, the branch with the most work alone.

    A `while` says nothing about how often it turns: it counts once (see `warn_of_unknown`).
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return (Body(_open(params["jaxpr"]), int(params["length"])),)
    if name == "while":
        _unknown.setdefault(_WHILE, False)
        return (Body(_open(params["cond_jaxpr"])), Body(_open(params["body_jaxpr"])))
    if name == "cond":
        branches = [_open(branch) for branch in readable_branches(eqn)]
        return (Body(max(branches, key=_weight)),)
    if name not in TRANSPARENT:
        return ()
    inner = params.get("call_jaxpr", params.get("jaxpr"))
    return () if inner is None else (Body(_open(inner)),)


def equation_flops(eqn: jex.JaxprEqn) -> float:
    """Operations of one equation, everything inside it included."""
    inner = bodies(eqn)
    if inner:
        return float(sum(body.times * jaxpr_flops(body.jaxpr) for body in inner))
    return work(eqn).flops


def jaxpr_flops(jaxpr: jex.Jaxpr | jex.ClosedJaxpr) -> float:
    """Operations of a whole jaxpr.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr_flops(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))))
        48.0
    """
    return float(sum(equation_flops(eqn) for eqn in _open(jaxpr).eqns))


def matmul_unit(eqn: jex.JaxprEqn) -> str:
    """Which rate of a device a product runs at: the dtype name of its operands.

    float32 products at default precision run on tensor cores as "tensorfloat32" where a device has
    that rate (XLA:GPU allows it from Ampere on); "float32" is the rate of full precision.
    """
    dtype = jax.numpy.result_type(*(a.aval.dtype for a in eqn.invars[:2]))
    if dtype != np.float32:
        return np.dtype(dtype).name
    precision = eqn.params.get("precision")
    wanted = precision if isinstance(precision, tuple) else (precision,)
    exact = any(p in (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH) for p in wanted)
    return "float32" if exact else "tensorfloat32"


def _matmul_flops(eqn: jex.JaxprEqn) -> float:
    """2 x output elements x contracted length; a ragged product meets each row with one group only."""
    left, right = (a.aval.shape for a in eqn.invars[:2])
    if eqn.primitive.name != "dot_general":
        return 2.0 * math.prod(left) * right[-1]
    contracted = eqn.params["dimension_numbers"][0][0]
    return 2.0 * _size(eqn.outvars[0]) * math.prod(left[dim] for dim in contracted)


def _convolution_flops(eqn: jex.JaxprEqn) -> float:
    """2 x output elements x kernel elements an output element meets (padding counted as work)."""
    spec = eqn.params["dimension_numbers"].rhs_spec
    kernel = eqn.invars[1].aval.shape
    per_output = math.prod(kernel[dim] for dim in spec[1:])  # input features of one group x window
    return 2.0 * _size(eqn.outvars[0]) * per_output / eqn.params["batch_group_count"]


def _factor_flops(eqn: jex.JaxprEqn) -> float:
    name = eqn.primitive.name
    if name == "tridiagonal_solve":
        return 8.0 * _size(eqn.outvars[0])
    if name == "cholesky_update":
        return 4.0 * _size(eqn.invars[0])  # a rotation an entry
    *batch, rows, columns = eqn.invars[0].aval.shape
    if name == "triangular_solve":
        return float(_size(eqn.invars[1]) * columns)
    return _FACTOR_FLOPS[name] * math.prod(batch) * rows * columns * min(rows, columns)


def _arithmetic_flops(eqn: jex.JaxprEqn) -> int:
    """One an element; a power by repeated squaring takes its multiplications."""
    if eqn.primitive.name != "integer_pow":
        return 1
    bits = bin(abs(eqn.params["y"]))[2:]
    return max(1, len(bits) + bits.count("1") - 2)


Of = Callable[..., Work]


def _kernel(eqn: jex.JaxprEqn, of: Of) -> Work:
    """A Pallas kernel: what its author estimates, else its body once for every point of the grid."""
    params = eqn.params
    estimate = params.get("cost_estimate")
    grid = getattr(params.get("grid_mapping"), "grid", ())
    points = math.prod(side for side in grid if isinstance(side, int))
    inner = [
        e for e in _deep(_open(params["jaxpr"])) if e.primitive.name in MATMULS | ARITHMETIC | TRANSCENDENTAL
    ]
    products = [e for e in inner if e.primitive.name in MATMULS]
    flops = points * sum(work(e).flops for e in inner)
    if estimate is not None:
        flops = float(estimate.flops)
    return of(flops, Fusion.WHOLE, matmul_unit(products[0]) if products else "")


def _solve(eqn: jex.JaxprEqn, of: Of) -> Work:
    """A linear solve given as functions: one run of the solver."""
    solver = getattr(eqn.params["jaxprs"], "solve", None)
    return of(0.0 if solver is None else jaxpr_flops(solver), Fusion.WHOLE)


def _symmetric(eqn: jex.JaxprEqn, of: Of) -> Work:
    """A matrix times its own transpose, of which half is computed."""
    return of(float(_size(eqn.invars[0]) * eqn.invars[0].aval.shape[-2]), Fusion.WHOLE, matmul_unit(eqn))


def _collective(eqn: jex.JaxprEqn, of: Of) -> Work:
    return of(sum(_size(v) for v in eqn.outvars), Fusion.WHOLE)


def _deep(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Every equation of a kernel's body, those in its loops and branches once."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, jex.Jaxpr | jex.ClosedJaxpr):
                    yield from _deep(_open(inner))


def _sort(eqn: jex.JaxprEqn, of: Of) -> Work:
    length = eqn.invars[0].aval.shape[eqn.params["dimension"]] if eqn.invars[0].aval.shape else 1
    return of(_size(eqn.invars[0]) * max(1.0, math.log2(max(2, length)) ** 2 / 2), Fusion.WHOLE)


def _top_k(eqn: jex.JaxprEqn, of: Of) -> Work:
    return of(_size(eqn.invars[0]) * math.log2(max(2, eqn.params.get("k", 2))), Fusion.WHOLE)


def _fft(eqn: jex.JaxprEqn, of: Of) -> Work:
    points = math.prod(eqn.params["fft_lengths"])
    return of(
        5.0 * max(_size(eqn.invars[0]), _size(eqn.outvars[0])) * math.log2(max(2, points)), Fusion.WHOLE
    )


def _cumulative(eqn: jex.JaxprEqn, of: Of) -> Work:
    length = eqn.invars[0].aval.shape[eqn.params["axis"]]
    return of(_size(eqn.invars[0]) * max(1.0, math.log2(max(2, length))), Fusion.WHOLE)


def _window(eqn: jex.JaxprEqn, of: Of) -> Work:
    window = math.prod(eqn.params.get("window_dimensions", (1,)))
    return of(float(min(_size(a) for a in (eqn.invars[0], eqn.outvars[0])) * window), Fusion.WHOLE)


def _scatter(eqn: jex.JaxprEqn, of: Of) -> Work:
    """The operand is updated in place: only what is touched is read and written back."""
    updates = _bytes(eqn.invars[2])
    indices = _bytes(eqn.invars[1])
    work = of(_size(eqn.invars[2]), Fusion.WHOLE, reads=(updates, indices, updates))
    return Work(flops=work.flops, reads=work.reads, writes=(updates,), fusion=Fusion.WHOLE)


def _update_slice(eqn: jex.JaxprEqn, of: Of) -> Work:
    update = _bytes(eqn.invars[1])
    return Work(
        flops=0, reads=(0, update, *(0 for _ in eqn.invars[2:])), writes=(update,), fusion=Fusion.LOOP
    )


def _attention(eqn: jex.JaxprEqn, of: Of) -> Work:
    """Fused attention by cuDNN: query `[batch, target, heads, head_dim]`, key `[batch, source, ...]`."""
    source = eqn.invars[1].aval.shape[1]
    return of(4.0 * _size(eqn.invars[0]) * source, Fusion.WHOLE, matmul_unit(eqn))


def _random(eqn: jex.JaxprEqn, of: Of) -> Work:
    return of(sum(_size(v) for v in eqn.outvars) * RANDOM_FLOPS, Fusion.LOOP)


_SPECIAL: dict[str, Callable[[jex.JaxprEqn, Of], Work]] = {
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "fft": _fft,
    "dynamic_update_slice": _update_slice,
    "pallas_call": _kernel,
    "custom_linear_solve": _solve,
    "symmetric_product": _symmetric,
    "lu_pivots_to_permutation": _collective,
    **dict.fromkeys(COLLECTIVES, _collective),
    **dict.fromkeys(CUMULATIVE, _cumulative),
    **dict.fromkeys(WINDOWS, _window),
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(RANDOM, _random),
    **dict.fromkeys(ATTENTION, _attention),
}


def _weight(jaxpr: jex.Jaxpr) -> tuple[float, int]:
    return jaxpr_flops(jaxpr), sum(_bytes(v) for eqn in jaxpr.eqns for v in eqn.outvars)


def _open(jaxpr: Any) -> jex.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def _shape(atom: Any) -> Sequence[int]:
    return getattr(atom.aval, "shape", ())


def _size(atom: Any) -> int:
    return math.prod(_shape(atom))


def _bytes(atom: Any) -> int:
    """Bytes of a value; literals are part of the code, tokens are nothing."""
    if isinstance(atom, jex.Literal) or not hasattr(atom.aval, "shape"):
        return 0
    return aval_bytes(atom.aval)
