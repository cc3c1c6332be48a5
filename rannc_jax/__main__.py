"""`python -m rannc_jax`: the command line."""

import sys

from rannc_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
