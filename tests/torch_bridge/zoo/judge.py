"""One specimen against torch: outputs at 1, 3 and 8 rows, gradients, two training steps, dropout.

A deviation may be as large as the limits of tests/parity/measure.py allow; where a network amplifies
rounding, as large as a few times torch's own deviation in float32 from itself in float64. A refusal
counts as one only if torch.export by itself refuses the bare module.
"""

import enum
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.zoo import measure, runs
from tests.torch_bridge.zoo.specimen import Specimen, build, split
from torch_bridge.errors import BridgeError

EXAMPLE_ROWS = 4


class Outcome(enum.StrEnum):
    """What became of a specimen in a mode."""

    PASSED = "pass"
    REFUSED = "torch.export refuses"
    NOT_CONVERTED = "conversion fails"
    NOT_RUN = "run fails"
    DIFFERS = "differs"
    TORCH_FAILS = "torch fails"
    TIMED_OUT = "out of time"
    PLAIN = "draws nothing"  # no dropout to look at
    EXPORT_DIFFERS = "torch.export differs"  # so does torch's own exported program, run by torch


FINE = frozenset({Outcome.PASSED, Outcome.REFUSED, Outcome.PLAIN, Outcome.EXPORT_DIFFERS})


def judge(specimen: Specimen, mode: str) -> dict[str, Any]:
    """A record of one specimen in mode "eval", "train" or "dropout"."""
    began = time.perf_counter()
    record: dict[str, Any] = {"specimen": specimen.name, "mode": mode, "listed": specimen.listed}
    try:
        record |= _judge(specimen, mode)
    except runs.TorchFails as error:
        record |= {"outcome": Outcome.TORCH_FAILS, "detail": _short(error.__cause__ or error)}
    return record | {"seconds": round(time.perf_counter() - began, 2)}


def _judge(specimen: Specimen, mode: str) -> dict[str, Any]:
    def fresh() -> nn.Module:
        module = build(specimen, dropout=0.3 if mode == "dropout" else 0.0).train(mode != "eval")
        runs.warm_up(module, specimen.batch(EXAMPLE_ROWS))
        return module

    wanted: measure.Values = {}
    args, kwargs = split(specimen.batch(EXAMPLE_ROWS))
    if mode != "dropout":
        wanted = runs.in_torch(fresh, specimen.batch, inputs=specimen.input_gradients)
    elif not runs.draws(fresh, args, kwargs):
        return {"outcome": Outcome.PLAIN}
    module = fresh()
    began = time.perf_counter()
    try:
        converted = torch_bridge.convert(module, args, kwargs, batch_dims=specimen.batch_dims)
    except Exception as error:
        return _refused(error, fresh(), args, kwargs)
    record: dict[str, Any] = {"convert_s": round(time.perf_counter() - began, 2)}
    record |= {"reason": converted.programs.reason, "dynamic": converted.programs.dynamic_reason}
    try:
        if mode == "dropout":
            problems = runs.dropout_problems(converted, specimen.batch(EXAMPLE_ROWS))
        else:
            problems, record["deviations"] = _compared(specimen, mode, fresh, wanted, converted)
    except runs.TorchFails:
        raise
    except Exception as error:
        return record | {"outcome": Outcome.NOT_RUN, "detail": _short(error)}
    record["exports"] = len(converted.programs.cache)
    outcome = Outcome.PASSED
    if problems:
        own = mode != "dropout" and not specimen.random and _export_differs(specimen, fresh, wanted)
        outcome = Outcome.EXPORT_DIFFERS if own else Outcome.DIFFERS
    return record | {"outcome": outcome, "detail": "; ".join(problems)[:600]}


def _refused(error: Exception, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """A failed conversion; it is torch.export's doing if that, alone, fails in the same way."""
    detail, own = _short(error), refusal(module, args, kwargs)
    same = bool(own) and isinstance(error, BridgeError) and own.split(":")[0] in detail
    outcome = Outcome.REFUSED if same else Outcome.NOT_CONVERTED
    return {"outcome": outcome, "detail": detail, "torch": own}


def _compared(
    specimen: Specimen,
    mode: str,
    fresh: Callable[[], nn.Module],
    wanted: measure.Values,
    converted: torch_bridge.JaxModule,
) -> tuple[list[str], dict[str, Any]]:
    got = runs.in_jax(converted, specimen.batch, wanted.keys())
    if specimen.random and mode == "train":
        return measure.shape_problems(got, wanted), {}

    def exact() -> measure.Values:
        return runs.in_torch(
            lambda: fresh().double(),
            lambda rows: runs.doubled(specimen.batch(rows)),
            inputs=specimen.input_gradients,
        )

    return measure.compare(got, wanted, exact)


def _export_differs(specimen: Specimen, fresh: Callable[[], nn.Module], wanted: measure.Values) -> bool:
    """Whether the program that torch exports by itself, run by torch, differs from the module as well."""
    args, kwargs = split(specimen.batch(runs.ROWS[0]))
    try:
        program = torch.export.export(fresh(), args, kwargs, strict=False)
        got = runs.in_torch(program.module, specimen.batch, inputs=specimen.input_gradients)
    except Exception:
        return False
    shared = {name: value for name, value in wanted.items() if name in got}
    return bool(measure.compare(got, shared, dict)[0])


def refusal(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why torch.export by itself refuses a module; "" if it does not."""
    try:
        torch.export.export(module, args, kwargs, strict=False).run_decompositions({})
    except Exception as error:
        return _short(error)
    return ""


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
