"""Names for the content of blocks: a chain of SHA-256 digests.

A block's digest covers its parent's digest, and so every token before it, besides its
own tokens and whatever else decides its K and V (an adapter, a salt). Equal digests
mean equal content, in every process and on every machine.

What is hashed, with tokens as 32-bit little-endian unsigned integers:

    parent (32 bytes) | tokens                              4n bytes
    tagged parent | tagged tokens | tagged extras | zeros   4n + 1 bytes

The second is for a block whose parent is not a digest, or that has extras: the first
of a chain. The lengths keep the two apart, the tags what is in the second.
"""

import array
import hashlib
import operator
import struct
import sys
from collections.abc import Sequence

import numpy as np

DIGEST_SIZE = 32
_TOKEN_SIZE = 4
_NUM_TOKEN_IDS = 2 ** (8 * _TOKEN_SIZE)
_sha256 = hashlib.sha256()  # copied for each block, which costs less than a new one


def _tagged(tag: bytes, value: bytes) -> bytes:
    """Length-prefix both parts, so that no two pairs give the same bytes."""
    sizes = len(tag).to_bytes(8, "little") + len(value).to_bytes(8, "little")
    return sizes + tag + value


def _encode(value: str | bytes | int) -> bytes:
    """Return distinct bytes for distinct values, types told apart."""
    if isinstance(value, bytes):
        return _tagged(b"bytes", value)
    if isinstance(value, str):
        return _tagged(b"str", value.encode("utf-8", "surrogatepass"))
    number = operator.index(value)
    size = number.bit_length() // 8 + 1
    return _tagged(b"int", number.to_bytes(size, "little", signed=True))


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
    first), its tokens, and, in the first block only, the extras; later blocks inherit
    them by the chain. To continue a chain, pass the last digest as `parent` and no
    extras.

    Args:
        token_ids: Integers from 0 to 2**32 - 1, in an array those of any integer
            dtype; tokens after the last full block are not hashed.
        block_size: Tokens a block.
        parent: Digest of the block before the first, or the root of a pool
            (`BlockPool.root`: weights, KV format, block size). None: an empty root.
        adapter: Identity of the adapter that computed K and V, of one load of it.
        salt: Kept apart from every other salt, and from none.
        extras: (name, value) pairs of anything else that changes K and V, in order.

    Returns:
        One digest of 32 bytes for each full block.

    Raises:
        ValueError: `block_size` is not positive, or a token id is not such an integer.
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
    data = _little_endian(token_ids)
    width = _TOKEN_SIZE * block_size
    num_bytes = len(data) // width * width
    blocks = struct.iter_unpack(f"{width}s", data[:num_bytes])
    digest = b"" if parent is None else parent
    digests: list[bytes] = []
    if num_bytes and (first or len(digest) != DIGEST_SIZE):
        (tokens,) = next(blocks)
        digest = _root_digest(digest, tokens, first)
        digests.append(digest)
    # The loop is most of what prefix caching costs.
    copy = _sha256.copy
    for (tokens,) in blocks:
        sha256 = copy()
        sha256.update(digest)
        sha256.update(tokens)
        digest = sha256.digest()
        digests.append(digest)
    return digests


def _root_digest(root: bytes, tokens: bytes, extras: bytes) -> bytes:
    message = _tagged(b"parent", root) + _tagged(b"tokens", tokens) + extras
    # One more than a multiple of 4 bytes, as no message of a later block has.
    message += bytes(-len(message) % _TOKEN_SIZE + 1)
    return hashlib.sha256(message).digest()


def _little_endian(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Return the tokens as 32-bit unsigned integers; refuse what does not fit."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype.kind not in "iu":
            raise ValueError(
                f"token ids must be integers, got an array of {token_ids.dtype}"
            )
        if token_ids.size:
            _check_range(int(token_ids.min()))
            _check_range(int(token_ids.max()))
        return token_ids.astype(f"<u{_TOKEN_SIZE}").tobytes()
    # Of anything but a list, array.array might take the bytes and not the elements.
    tokens = token_ids if isinstance(token_ids, list) else list(token_ids)
    try:
        packed = array.array("I", tokens)  # a quarter of numpy's time
    except (OverflowError, TypeError):
        for token in tokens:
            if not hasattr(token, "__index__"):
                message = f"token ids must be integers, got {token!r}"
                raise ValueError(message) from None
            _check_range(operator.index(token))
        raise
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _check_range(token_id: int) -> None:
    if not 0 <= token_id < _NUM_TOKEN_IDS:
        raise ValueError(
            f"token ids must be at least 0 and less than 2**32, got {token_id}"
        )


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
