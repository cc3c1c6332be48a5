"""`python -m torch_bridge coverage package.module:factory` prints the coverage table of a module.

`factory()` returns (module, args) or (module, args, kwargs). The exit status is 1 if an operator has no
lowering.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from torch_bridge.coverage import coverage


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_bridge", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("coverage", help="which operators of a module have a lowering")
    command.add_argument("factory", help="package.module:factory")
    options = parser.parse_args(arguments)
    module_name, _, function = options.factory.partition(":")
    if not function:
        parser.error(f"expected package.module:factory, got {options.factory!r}")
    sys.path.insert(0, "")
    table = coverage(*getattr(importlib.import_module(module_name), function)())
    sys.stdout.write(f"{table}\n")
    return 1 if table.missing else 0


if __name__ == "__main__":
    sys.exit(main())
