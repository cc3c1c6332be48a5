"""Programs that say the same are compiled once.

Chunks of an interleaved schedule are often copies of each other, and those of one rank run on one sub-mesh.
The first call of a program lowers it; if another has come to the same text there, that one is called from
then on.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from jax.sharding import Mesh

Pool = MutableMapping[tuple[Mesh, str], Callable[..., Sequence[Any]]]


class Alike:
    """A jitted program that looks for its like before it is compiled.

    Args:
        jitted: the program.
        mesh: where it runs.
        pool: shared by the programs that may be alike.
    """

    def __init__(self, jitted: Any, mesh: Mesh, pool: Pool) -> None:
        self._jitted, self._mesh, self._pool = jitted, mesh, pool
        self.chosen: Callable[..., Sequence[Any]] | None = None

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.chosen is None:
            text = self._jitted.lower(*args).as_text()
            self.chosen = self._pool.setdefault((self._mesh, text), self._jitted)
        return self.chosen(*args)
