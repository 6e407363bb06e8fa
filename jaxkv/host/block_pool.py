"""Which blocks of the cache are in use: `BlockPool`.

Every block but `NULL_BLOCK` is in exactly one of three states:

    free      no holder, no digest: its content means nothing
    cached    no holder, but a published digest: its content can be found again
    held      one holder or more (a shared block counts once); may have a digest

`free + cached + held == num_blocks - 1` at every moment. Blocks are handed out from
the free ones first, oldest first, then by evicting cached ones, least recently used
first. Every operation is O(1) a block, and changes nothing if it fails.

What there is for every block, used or not, lies in arrays: of a list as long as the
pool, Python's garbage collector would visit every entry again and again.
"""

import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxkv.config import NULL_BLOCK


class _FreeBlocks:
    """The free blocks' ids, oldest first: a ring of 32-bit integers.

    `len(self)` ids from `_first` on, past the end of the array from its start on:

        [7 8 . . . . 3 4 5 6]
             ^       ^ first
    """

    def __init__(self, num_blocks: int):
        """Start with every block free, in the order of their ids."""
        self._ids = array.array("I", range(NULL_BLOCK + 1, num_blocks))
        self._first = 0
        self._length = len(self._ids)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        ids = self._ids[self._first :] + self._ids[: self._first]
        return iter(ids[: self._length])

    def take(self, n: int) -> list[int]:
        """Remove the n oldest."""
        assert n <= self._length, f"{n} of {self._length} free blocks wanted"
        end = self._first + n
        block_ids = self._ids[self._first : end].tolist()
        if end >= len(self._ids):
            end -= len(self._ids)
            block_ids += self._ids[:end].tolist()
        self._first = end
        self._length -= n
        return block_ids

    def append(self, block_id: int) -> None:
        """Add one as the newest."""
        assert self._length < len(self._ids), f"block {block_id} is one too many"
        self._ids[(self._first + self._length) % len(self._ids)] = block_id
        self._length += 1


class BlockPool:
    """Reference counts, the order of reuse, and the index of published blocks.

    It knows ids and digests, nothing of tokens or arrays.

    Attributes:
        num_blocks: Blocks in the pool, the null block included.
        block_size: Tokens a block; kept for those who hold the pool.
        enable_prefix_caching: Without it `publish` does nothing and `lookup` finds
            nothing, so no block is ever cached.
        root: What chains of digests start from.
        on_evict: Called with (block_id, digest) for each cached block that `allocate`
            takes, when the block is no longer in the index and before its new holder
            writes to it. It must neither raise nor call the pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        root: bytes = b"",
        on_evict: Callable[[int, bytes], None] | None = None,
    ):
        """Make a pool whose blocks are all free; it hands out 1, 2, 3, ...

        Raises:
            ValueError: Fewer than two blocks, or a block of no tokens.
        """
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block {NULL_BLOCK} is the null "
                f"block), got {num_blocks}"
            )
        if block_size < 1:
            raise ValueError(f"block_size must be a positive integer, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.root = root
        self.on_evict = on_evict
        self._ref_counts = array.array("i", [0]) * num_blocks
        self._digests: dict[int, bytes] = {}
        self._index: dict[bytes, int] = {}
        self._free = _FreeBlocks(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks without a holder and without a digest."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder whose content can be found again."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks with a holder; a shared one counts once."""
        return self.num_blocks - 1 - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """Return how many references a block has.

        Raises:
            ValueError: The id is outside the pool.
        """
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(
                f"block {block_id} is outside the pool of {self.num_blocks} blocks"
            )
        return self._ref_counts[block_id]

    def is_free(self, block_id: int) -> bool:
        """Return whether a block has neither holder nor digest.

        Raises:
            ValueError: The id is outside the pool.
        """
        return self.ref_count(block_id) == 0 and block_id not in self._cached

    def allocate(self, n: int) -> list[int] | None:
        """Take n blocks, each with one reference, evicting cached ones if need be.

        Returns:
            The ids, or None if fewer than n are free or cached: then nothing changed.

        Raises:
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.num_available:
            return None
        num_unhashed = min(n, len(self._free))
        block_ids = self._free.take(num_unhashed)
        evicted = [self._evict() for _ in range(n - num_unhashed)]
        block_ids.extend(block_id for block_id, _ in evicted)
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        if self.on_evict is not None:
            for block_id, digest in evicted:
                self.on_evict(block_id, digest)
        return block_ids

    def _evict(self) -> tuple[int, bytes]:
        block_id, _ = self._cached.popitem(last=False)
        digest = self._digests.pop(block_id)
        del self._index[digest]
        return block_id, digest

    def share(self, block_ids: Sequence[int]) -> None:
        """Take one more reference to each block; a cached one becomes held again.

        Raises:
            ValueError: A block is neither held nor cached; nothing changed.
        """
        for block_id in block_ids:
            if self.ref_count(block_id) == 0 and block_id not in self._cached:
                raise ValueError(f"block {block_id} is neither held nor cached")
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block; the only way back.

        The last id goes back first, so of a chain the deepest block is reused first.
        A block without holders becomes cached if it has a digest, else free.

        Args:
            block_ids: In chain order; an id may occur as often as it has references.

        Raises:
            ValueError: A block has fewer references than that; nothing changed.
        """
        for block_id, count in Counter(block_ids).items():
            if self.ref_count(block_id) < count:
                raise ValueError(
                    f"cannot release block {block_id} {count} times: it has "
                    f"{self._ref_counts[block_id]} references"
                )
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._digests:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def publish(self, block_id: int, digest: bytes) -> None:
        """Make a held block's content known under its digest.

        If another block has the digest already, that one keeps it and this one stays
        without. Publishing the same again changes nothing.

        Raises:
            ValueError: The block is not held, or has another digest.
        """
        if self.ref_count(block_id) == 0:
            raise ValueError(f"cannot publish block {block_id}: it is not held")
        if not self.enable_prefix_caching:
            return
        known = self._digests.get(block_id)
        if known is not None and known != digest:
            raise ValueError(
                f"block {block_id} is published as {known.hex()}, cannot publish it as "
                f"{digest.hex()}"
            )
        if self._index.setdefault(digest, block_id) == block_id:
            self._digests[block_id] = digest

    def lookup(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest chain of published digests.

        Takes no reference and changes no order: `share` before anything else is
        allocated.
        """
        block_ids: list[int] = []
        for digest in digests:
            block_id = self._index.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def reset(self) -> None:
        """Forget every digest: cached blocks become free, held ones stay held."""
        self._digests.clear()
        self._index.clear()
        for block_id in self._cached:
            self._free.append(block_id)
        self._cached.clear()

    def check_invariants(self) -> None:
        """Assert that every block is in exactly one state and the index agrees."""
        free, cached = set(self._free), set(self._cached)
        held = {i for i, count in enumerate(self._ref_counts) if count > 0}
        every = set(range(NULL_BLOCK + 1, self.num_blocks))
        assert len(free) == len(self._free), (
            f"twice in the free list: {list(self._free)}"
        )
        assert min(self._ref_counts) >= 0, f"negative counts: {self._ref_counts}"
        sizes = (len(free), len(cached), len(held))
        assert sum(sizes) == len(every), f"free, cached, held {sizes} of {len(every)}"
        assert free | cached | held == every, f"lost: {every - free - cached - held}"
        assert sizes == (self.num_free, self.num_cached, self.num_held), sizes
        published = self._digests
        assert self._index == {d: i for i, d in published.items()}, self._index
        assert len(self._index) == len(published), "a digest has two blocks"
        assert not free & published.keys(), "a free block has a digest"
        assert cached <= published.keys(), "a cached block has no digest"
