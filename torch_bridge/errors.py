"""What goes wrong on the way from PyTorch to JAX.

Every error is a `BridgeError`; `UnsupportedOpError` is the one for operators without a lowering. A
message says what was wrong, where (operator, module path, the user's source line), and what to do.
"""


class BridgeError(ValueError):
    """The module cannot be converted, or a converted module is called in a way it cannot serve."""


class UnsupportedOpError(BridgeError, NotImplementedError):
    """An operator has no lowering, and PyTorch has no decomposition of it that leads to one."""


def message(what: str, *where: str, hint: str | None = None) -> str:
    """Lay out an error: one sentence, indented details one a line, and what to try.

    Example:
        >>> print(message("no lowering for aten.foo.", "module: encoder/layer/0", hint="upgrade"))
        no lowering for aten.foo.
          module: encoder/layer/0
          try: upgrade
    """
    details = [line for part in where for line in part.splitlines()]
    if hint is not None:
        details.append(f"try: {hint}")
    return "\n".join([what, *(f"  {line}" for line in details)])
