"""Names for the content of blocks: a chain of SHA-256 digests.

A block's digest covers its parent's digest, and so every token before it, besides its
own tokens and whatever else decides its K and V (an adapter, a salt). Equal digests
mean equal content, in every process and on every machine.
"""

import array
import hashlib
import operator
import sys
from collections.abc import Sequence

import numpy as np

DIGEST_SIZE = 32


def _tagged(tag: bytes, value: bytes) -> bytes:
    """Length-prefix both parts, so that no two pairs give the same bytes."""
    sizes = len(tag).to_bytes(8, "little") + len(value).to_bytes(8, "little")
    return sizes + tag + value


def _encode(value: str | bytes | int) -> bytes:
    """Return distinct bytes for distinct values, types told apart."""
    if isinstance(value, bytes):
        return _tagged(b"bytes", value)
    if isinstance(value, str):
        return _tagged(b"str", value.encode("utf-8"))
    return _tagged(b"int", str(operator.index(value)).encode())


def block_hashes(
    token_ids: Sequence[int] | np.ndarray,
    block_size: int,
    *,
    parent: bytes | None = None,
    adapter: str | bytes | int | None = None,
    salt: str | bytes | int | None = None,
    extras: Sequence[tuple[str, str | bytes | int]] = (),
) -> list[bytes]:
    """Hash every full block of `token_ids`, each over its parent.

    Block i's digest is SHA-256 over the digest of block i - 1 (`parent` for the
    first), the tokens as 64-bit little-endian integers, and, in the first block only,
    the extras, tagged and length-prefixed; later blocks inherit them by the chain. To
    continue a chain, pass the last digest as `parent` and no extras.

    Args:
        token_ids: Tokens; those after the last full block are not hashed.
        block_size: Tokens a block.
        parent: Digest of the block before the first, or the root of a pool
            (`BlockPool.root`: weights, KV format, block size). None: an empty root.
        adapter: Identity of the adapter that computed K and V, of one load of it.
        salt: Kept apart from every other salt, and from none.
        extras: (name, value) pairs of anything else that changes K and V, in order.

    Returns:
        One digest of 32 bytes for each full block.

    Raises:
        ValueError: `block_size` is not positive.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be a positive integer, got {block_size}")
    named = [("adapter", adapter), ("salt", salt)]
    pairs = [(name, value) for name, value in named if value is not None]
    first = b"".join(
        _tagged(kind, _encode(name) + _encode(value))
        for kind, group in ((b"named", pairs), (b"extra", list(extras)))
        for name, value in group
    )
    tokens = _little_endian(token_ids)
    width = 8 * block_size
    if len(tokens) < width:
        return []
    message = _tagged(b"parent", b"" if parent is None else parent)
    message += _tagged(b"tokens", tokens[:width]) + first
    digest = hashlib.sha256(message).digest()
    digests = [digest]
    # The loop is most of what prefix caching costs: what is the same is made once.
    sha256 = hashlib.sha256
    before_parent = _tagged(b"parent", bytes(DIGEST_SIZE))[:-DIGEST_SIZE]
    before_tokens = _tagged(b"tokens", bytes(width))[:-width]
    for start in range(width, len(tokens) - width + 1, width):
        digest = sha256(
            before_parent + digest + before_tokens + tokens[start : start + width]
        ).digest()
        digests.append(digest)
    return digests


def _little_endian(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Return the tokens as 64-bit integers."""
    if isinstance(token_ids, np.ndarray) or sys.byteorder != "little":
        return np.asarray(token_ids, dtype="<i8").tobytes()
    return array.array("q", token_ids).tobytes()  # a third of numpy's time


class BlockChain:
    """The digests of one request's full blocks, extended as its tokens come.

    Attributes:
        root: What the chain starts from; two chains of different roots never meet.
        digests: One for each block hashed so far.
    """

    def __init__(
        self,
        block_size: int,
        root: bytes = b"",
        adapter: str | bytes | int | None = None,
        salt: str | bytes | int | None = None,
    ):
        """Start an empty chain; see `block_hashes`."""
        self.root = root
        self.digests: list[bytes] = []
        self._block_size = block_size
        self._adapter = adapter
        self._salt = salt

    def fork(self, num_tokens: int) -> "BlockChain":
        """Return a chain with the digests of the first tokens, to go its own way."""
        chain = BlockChain(self._block_size, self.root, self._adapter, self._salt)
        chain.digests = self.digests[: num_tokens // self._block_size]
        return chain

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Hash further blocks, until there are so many.

        Args:
            token_ids: All tokens from the first one on; at least num_blocks blocks.
            num_blocks: How many digests are wanted.

        Returns:
            `digests` itself: read it only; it may have more.
        """
        done = len(self.digests)
        if num_blocks > done:
            tokens = token_ids[done * self._block_size : num_blocks * self._block_size]
            self.digests += block_hashes(
                tokens,
                self._block_size,
                parent=self.digests[-1] if done else self.root,
                adapter=None if done else self._adapter,
                salt=None if done else self._salt,
            )
        return self.digests
