"""What goes wrong, in the house's form.

Every error of the package is a `RanncError`; each child also inherits the builtin that people catch.
A message says what was wrong, what was got and expected, where it is, and what to do. `message` lays
those parts out the same way everywhere:

    PlanError: no plan fits 16.0 GiB per device.
      smallest peak found: 19.3 GiB (stage 2 of 4)
      try: num_stages=6 (fits in 15.2 GiB)
"""

from collections.abc import Iterable


class RanncError(Exception):
    """The root of every error that this package raises on purpose."""


class TraceError(RanncError, TypeError):
    """The user's function cannot be turned into a program that may be cut."""


class CostError(RanncError, ValueError):
    """A cost cannot be stated, or a device description is not usable."""


class PlanError(RanncError, ValueError):
    """No plan satisfies the constraints, or a plan does not belong to this program or cluster."""


class InfeasibleError(PlanError):
    """Nothing satisfies the constraints."""


class MeshError(RanncError, ValueError):
    """The devices that are there are not the devices the plan was made for."""


class ScheduleError(RanncError, ValueError):
    """A schedule breaks a dependency, deadlocks, or cannot be parsed."""


class ConfigError(RanncError, ValueError):
    """A mesh or run file has mistakes; the message lists all of them."""


class RuntimeFailure(RanncError, RuntimeError):
    """Something failed while the devices were working."""


def message(what: str, *where: str, hint: str | None = None) -> str:
    """Lay out an error: one line that says what is wrong, indented details, and what to try.

    Args:
        what: one sentence.
        *where: details, one a line (got and expected, pytree path, equation, source line).
        hint: what to do; printed after "try: ".

    Example:
        >>> print(message("no plan fits.", "smallest peak: 3 GiB", hint="num_stages=2"))
        no plan fits.
          smallest peak: 3 GiB
          try: num_stages=2
    """
    lines: list[str] = [what, *_indented(where)]
    if hint is not None:
        lines += _indented([f"try: {hint}"])
    return "\n".join(lines)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {part}" for line in lines for part in line.splitlines()]
