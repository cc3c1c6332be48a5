"""Random numbers of a converted module: one key a node, folded from the caller's key.

The key of a node depends on the caller's key and the node's index in the exported graph alone, so a
module draws the same numbers however it is cut or recomputed. Bits are JAX's, not torch's; what is kept
is the distribution. Drawn arrays have the shape of the value they meet, batch rows where that has them.
"""

from typing import Any

import jax

from torch_bridge.errors import BridgeError, message


def node_key(rng: Any, index: int, path: str) -> jax.Array:
    """The key of the node with this index.

    Raises:
        BridgeError: if the caller gave no key.
    """
    if rng is None:
        raise BridgeError(
            message(
                "the module draws random numbers and was given no key.",
                f"module: {path or '(root)'}",
                hint="pass rng=jax.random.key(0), or convert module.eval()",
            )
        )
    return jax.random.fold_in(rng, index)


def row_seeds(key: jax.Array, rows: int) -> jax.Array:
    """Two words of seed for each batch row, `[rows, 2]` uint32.

    A value whose bits are made row by row from these (see `row_keep_mask`) needs no other random
    number, so whoever spreads rows over devices only has to spread these words.
    """
    return jax.random.bits(key, (rows, 2), "uint32")


def row_keep_mask(seeds: jax.Array, keep: float, shape: tuple[int, ...]) -> jax.Array:
    """Boolean `[rows, *shape]`, each true with probability `keep`; row i is made from seeds[i] alone."""

    def one_row(words: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.bernoulli(key, keep, shape)

    return jax.vmap(one_row)(seeds)
