"""What torch's optimizers do to one parameter, in JAX.

A rule says which tensors an optimizer keeps by parameter (its *slots*, under torch's own names), which
numbers a step needs (computed on the host in double precision, as torch does, from the parameter group and
the parameter's counters), and what becomes of the parameter. Formulas are those of `torch.optim` 2.11 to
2.13, `_single_tensor_*`; numbers are arguments of the compiled update, so a scheduler never compiles anew.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import torch

Group = Mapping[str, Any]
Numbers = dict[str, float]
Slots = dict[str, Any]
Change = tuple[Any, Slots]
"""What is added to the parameter, and its new slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One optimizer.

    Args:
        flags: keys of the group that choose the formula: another value is another program.
        slots: names of what is kept, by group.
        numbers: of a step, from the group and the counters after it; `counters["step"]` is the number of
            this step, from 1 on.
        change: from gradient, parameter, slots, numbers and flags.
        first: first value of a slot, by group; 0 where it is not named.
    """

    flags: tuple[str, ...]
    slots: Callable[[Group], tuple[str, ...]]
    numbers: Callable[[Group, dict[str, float]], Numbers]
    change: Callable[[Any, Any, Slots, Mapping[str, Any], Mapping[str, Any]], Change]
    first: Callable[[Group], Mapping[str, float]] = lambda group: {}


def _number(value: Any) -> float:
    return float(value)  # of a tensor, too: torch takes lr as one


def _betas(group: Group) -> tuple[float, float]:
    first, second = group["betas"]
    return _number(first), _number(second)


def _decayed(g: Any, p: Any, n: Mapping[str, Any]) -> Any:
    """The gradient with an L2 penalty."""
    return g + n["weight_decay"] * p


def _lerp(old: Any, new: Any, weight: Any) -> Any:
    return old + weight * (new - old)


def _squares(old: Any, g: Any, keep: Any) -> Any:
    return keep * old + (1 - keep) * g * g


# --- SGD ------------------------------------------------------------------------------------------


def _sgd_numbers(group: Group, counters: dict[str, float]) -> Numbers:
    return {
        "lr": _number(group["lr"]),
        "weight_decay": _number(group["weight_decay"]),
        "momentum": _number(group["momentum"]),
        "taken": 1.0 if counters["step"] == 1 else 1.0 - _number(group["dampening"]),
        "kept": 0.0 if counters["step"] == 1 else _number(group["momentum"]),
    }


def _sgd(g: Any, p: Any, s: Slots, n: Mapping[str, Any], flags: Mapping[str, Any]) -> Change:
    g = _decayed(g, p, n)
    if not s:
        return -n["lr"] * g, s
    momentum = n["kept"] * s["momentum_buffer"] + n["taken"] * g
    step = g + n["momentum"] * momentum if flags["nesterov"] else momentum
    return -n["lr"] * step, {"momentum_buffer": momentum}


# --- Adam and its family --------------------------------------------------------------------------


def _adam_numbers(group: Group, counters: dict[str, float]) -> Numbers:
    (beta1, beta2), step = _betas(group), counters["step"]
    lr, decay = _number(group["lr"]), _number(group["weight_decay"])
    decoupled = group.get("decoupled_weight_decay", False)
    return {
        "beta1": beta1,
        "beta2": beta2,
        "eps": _number(group["eps"]),
        "weight_decay": 0.0 if decoupled else decay,
        "shrink": lr * decay if decoupled else 0.0,
        "step_size": lr / (1 - beta1**step),
        "correction2": math.sqrt(1 - beta2**step),
    }


def _moments(g: Any, s: Slots, n: Mapping[str, Any]) -> tuple[Any, Any]:
    return _lerp(s["exp_avg"], g, 1 - n["beta1"]), _squares(s["exp_avg_sq"], g, n["beta2"])


def _adam(g: Any, p: Any, s: Slots, n: Mapping[str, Any], flags: Mapping[str, Any]) -> Change:
    g = _decayed(g, p, n)
    mean, square = _moments(g, s, n)
    new, largest = {"exp_avg": mean, "exp_avg_sq": square}, square
    if flags["amsgrad"]:
        new["max_exp_avg_sq"] = largest = jnp.maximum(s["max_exp_avg_sq"], square)
    scale = jnp.sqrt(largest) / n["correction2"] + n["eps"]
    decay = n["shrink"] * p
    return -(decay + n["step_size"] * mean / scale), new


def _nadam_numbers(group: Group, counters: dict[str, float]) -> Numbers:
    (beta1, beta2), step = _betas(group), counters["step"]
    lr, decay, pace = (_number(group[key]) for key in ("lr", "weight_decay", "momentum_decay"))
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (t * pace)) for t in (step, step + 1))
    product = counters["mu_product"] = counters.get("mu_product", 1.0) * mu
    decoupled = group["decoupled_weight_decay"]
    return {
        "beta1": beta1,
        "beta2": beta2,
        "eps": _number(group["eps"]),
        "weight_decay": 0.0 if decoupled else decay,
        "shrink": lr * decay if decoupled else 0.0,
        "correction2": 1 - beta2**step,
        "of_gradient": lr * (1 - mu) / (1 - product),
        "of_mean": lr * mu_next / (1 - product * mu_next),
    }


def _nadam(g: Any, p: Any, s: Slots, n: Mapping[str, Any], flags: Mapping[str, Any]) -> Change:
    g = _decayed(g, p, n)
    mean, square = _moments(g, s, n)
    scale = jnp.sqrt(square / n["correction2"]) + n["eps"]
    change = -(n["shrink"] * p + (n["of_gradient"] * g + n["of_mean"] * mean) / scale)
    return change, {"exp_avg": mean, "exp_avg_sq": square}


def _radam_numbers(group: Group, counters: dict[str, float]) -> Numbers:
    (beta1, beta2), step = _betas(group), counters["step"]
    lr, decay = _number(group["lr"]), _number(group["weight_decay"])
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    most = 2 / (1 - beta2) - 1
    length = most - 2 * step * beta2**step / correction2
    adapts = length > 5.0
    rectified = (
        math.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) if adapts else 0.0
    )
    decoupled = group["decoupled_weight_decay"]
    return {
        "beta1": beta1,
        "beta2": beta2,
        "eps": _number(group["eps"]),
        "weight_decay": 0.0 if decoupled else decay,
        "shrink": lr * decay if decoupled else 0.0,
        "adaptive": lr / correction1 * rectified * math.sqrt(correction2),
        "plain": 0.0 if adapts else lr / correction1,
    }


def _radam(g: Any, p: Any, s: Slots, n: Mapping[str, Any], flags: Mapping[str, Any]) -> Change:
    g = _decayed(g, p, n)
    mean, square = _moments(g, s, n)
    size = n["plain"] + n["adaptive"] / (jnp.sqrt(square) + n["eps"])
    return -(n["shrink"] * p + mean * size), {"exp_avg": mean, "exp_avg_sq": square}


def _adamax_numbers(group: Group, counters: dict[str, float]) -> Numbers:
    (beta1, beta2), lr = _betas(group), _number(group["lr"])
    return {
        "beta1": beta1,
        "beta2": beta2,
        "eps": _number(group["eps"]),
        "weight_decay": _number(group["weight_decay"]),
        "step_size": lr / (1 - beta1 ** counters["step"]),
    }


def _adamax(g: Any, p: Any, s: Slots, n: Mapping[str, Any], flags: Mapping[str, Any]) -> Change:
    g = _decayed(g, p, n)
    mean = _lerp(s["exp_avg"], g, 1 - n["beta1"])
    largest = jnp.maximum(n["beta2"] * s["exp_inf"], jnp.abs(g) + n["eps"])
    return -n["step_size"] * mean / largest, {"exp_avg": mean, "exp_inf": largest}


# --- the others -----------------------------------------------------------------------------------


def _adagrad_numbers(group: Group, counters: dict[str, float]) -> Numbers:
    slower = 1 + (counters["step"] - 1) * _number(group["lr_decay"])
    return {
        "lr": _number(group["lr"]) / slower,
        "eps": _number(group["eps"]),
        "weight_decay": _number(group["weight_decay"]),
    }


def _adagrad(g: Any, p: Any, s: Slots, n: Mapping[str, Any], flags: Mapping[str, Any]) -> Change:
    g = _decayed(g, p, n)
    total = s["sum"] + g * g
    return -n["lr"] * g / (jnp.sqrt(total) + n["eps"]), {"sum": total}


def _rmsprop_slots(group: Group) -> tuple[str, ...]:
    extra = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *extra, *(("grad_avg",) if group["centered"] else ()))


def _rmsprop_numbers(group: Group, counters: dict[str, float]) -> Numbers:
    return {key: _number(group[key]) for key in ("lr", "alpha", "eps", "weight_decay", "momentum")}


def _rmsprop(g: Any, p: Any, s: Slots, n: Mapping[str, Any], flags: Mapping[str, Any]) -> Change:
    g = _decayed(g, p, n)
    new: Slots = {"square_avg": _squares(s["square_avg"], g, n["alpha"])}
    variance = new["square_avg"]
    if "grad_avg" in s:
        new["grad_avg"] = _lerp(s["grad_avg"], g, 1 - n["alpha"])
        variance = variance - new["grad_avg"] ** 2
    step = g / (jnp.sqrt(variance) + n["eps"])
    if "momentum_buffer" in s:
        new["momentum_buffer"] = step = n["momentum"] * s["momentum_buffer"] + step
    return -n["lr"] * step, new


def _adadelta_numbers(group: Group, counters: dict[str, float]) -> Numbers:
    return {key: _number(group[key]) for key in ("lr", "rho", "eps", "weight_decay")}


def _adadelta(g: Any, p: Any, s: Slots, n: Mapping[str, Any], flags: Mapping[str, Any]) -> Change:
    g = _decayed(g, p, n)
    square = _squares(s["square_avg"], g, n["rho"])
    step = jnp.sqrt(s["acc_delta"] + n["eps"]) / jnp.sqrt(square + n["eps"]) * g
    return -n["lr"] * step, {"square_avg": square, "acc_delta": _squares(s["acc_delta"], step, n["rho"])}


def _kept(*names: str) -> Callable[[Group], tuple[str, ...]]:
    return lambda group: names


_ADAM = Rule(
    flags=("amsgrad", "maximize"),
    slots=lambda group: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())),
    numbers=_adam_numbers,
    change=_adam,
)
RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule(
        flags=("nesterov", "maximize"),
        slots=lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
        numbers=_sgd_numbers,
        change=_sgd,
    ),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: Rule(
        flags=("maximize",), slots=_kept("exp_avg", "exp_avg_sq"), numbers=_nadam_numbers, change=_nadam
    ),
    torch.optim.RAdam: Rule(
        flags=("maximize",), slots=_kept("exp_avg", "exp_avg_sq"), numbers=_radam_numbers, change=_radam
    ),
    torch.optim.Adamax: Rule(
        flags=("maximize",), slots=_kept("exp_avg", "exp_inf"), numbers=_adamax_numbers, change=_adamax
    ),
    torch.optim.Adagrad: Rule(
        flags=("maximize",),
        slots=_kept("sum"),
        numbers=_adagrad_numbers,
        change=_adagrad,
        first=lambda group: {"sum": group["initial_accumulator_value"]},
    ),
    torch.optim.RMSprop: Rule(
        flags=("maximize", "centered"), slots=_rmsprop_slots, numbers=_rmsprop_numbers, change=_rmsprop
    ),
    torch.optim.Adadelta: Rule(
        flags=("maximize",),
        slots=_kept("square_avg", "acc_delta"),
        numbers=_adadelta_numbers,
        change=_adadelta,
    ),
}
"""By class, exactly: a subclass may do anything."""
