"""The largest of many numbers, without sorting them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

_TILE = 64


def largest(
    x: Float[Array, "rows width"], k: int
) -> tuple[Float[Array, "rows k"], Int32[Array, "rows k"]]:
    """Return each row's k largest numbers and their places, as `lax.top_k` does.

    Of the tiles a row is cut into, only the k of the largest maxima can hold any of its
    k largest numbers, so what is sorted are those maxima and then the numbers of k
    tiles. For a vocabulary that is several times as fast as `lax.top_k` on CPU.

    Args:
        x: No NaN.
        k: At most `width`.

    Returns:
        The numbers, in falling order, and their places; of equal numbers the first in
        the row comes first.
    """
    rows, width = x.shape
    num_tiles = -(-width // _TILE)
    if num_tiles <= k:
        values, place = lax.top_k(x, k)
        return values, place
    # What fills the last tile comes after everything else in the row.
    padding = ((0, 0), (0, num_tiles * _TILE - width))
    tiles = jnp.pad(x, padding, constant_values=-jnp.inf)
    tiles = tiles.reshape(rows, num_tiles, _TILE)
    _, chosen = lax.top_k(jnp.max(tiles, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # so that places rise along the candidates
    candidates = jnp.take_along_axis(tiles, chosen[:, :, None], axis=1)
    values, place = lax.top_k(candidates.reshape(rows, k * _TILE), k)
    tile = jnp.take_along_axis(chosen, place // _TILE, axis=1)
    return values, tile * _TILE + place % _TILE
