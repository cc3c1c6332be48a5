"""The command line, with the standard library's argparse: `plan`, `show`, `simulate`,
`diff`, `doctor`, `calibrate` and `demo`.

A command prints to standard output and returns its exit status. Mistakes of the user's (any `RanncError`,
a file that is not there) become one message on standard error and status 2, without a traceback.
"""

from rannc_jax.cli.commands import main

__all__ = ["main"]
