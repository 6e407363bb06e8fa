"""Who holds which blocks: every request's block table, in one place.

A request's table lists its blocks in the order of its tokens: token i lies in
`table[i // block_size]`. There is one layer group today; more of them will each have
their tables here, and every operation will then be all or nothing across them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from jaxkv.host.block_pool import BlockPool


class BlockTables:
    """The block tables of all requests, grown and cut against one `BlockPool`.

    No table has more blocks than its tokens need. A request without blocks is unknown
    here: it owns nothing.
    """

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self._tables: dict[str, list[int]] = {}

    @property
    def num_references(self) -> int:
        """Blocks of all tables; a shared one counts once for each."""
        return sum(map(len, self._tables.values()))

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.pool.block_size)

    def blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """Return how many more blocks the request needs to hold so many tokens."""
        held = len(self._tables.get(request_id, ()))
        return max(0, self.blocks_for(num_tokens) - held)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Lengthen the request's table until it holds so many tokens.

        Returns:
            Whether it does now; if not, nothing changed.
        """
        needed = self.blocks_needed(request_id, num_tokens)
        if needed == 0:
            return True
        block_ids = self.pool.allocate(needed)
        if block_ids is None:
            return False
        self._tables.setdefault(request_id, []).extend(block_ids)
        return True

    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Begin the request's table with blocks that hold its first tokens already.

        Args:
            request_id: A request without blocks.
            block_ids: Held or cached ones; each gets one more reference.
        """
        assert request_id not in self._tables, f"{request_id!r} has blocks already"
        if block_ids:
            self.pool.share(block_ids)
            self._tables[request_id] = list(block_ids)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks that lie wholly past the first `num_tokens` tokens.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"cannot truncate {request_id!r} to {num_tokens} tokens")
        table = self._tables.get(request_id, [])
        keep = self.blocks_for(num_tokens)
        self.pool.release(table[keep:])
        del table[keep:]
        if not table:
            self._tables.pop(request_id, None)

    def release(self, request_id: str) -> None:
        """Give back all of the request's blocks; again or unknown: nothing."""
        self.pool.release(self._tables.pop(request_id, []))

    def table(self, request_id: str) -> list[int]:
        """Return the request's block ids in token order.

        It is the table itself, not a copy: read it only. Between `truncate` and
        `release` it only grows at its end.
        """
        return self._tables.get(request_id, [])

    def reclaimable(
        self, request_ids: Iterable[str], less: Collection[int] = ()
    ) -> int:
        """Return how many blocks only these requests hold, `less` not counted.

        So many become free or cached when all of them give their tables back.
        """
        tables = [self._tables.get(request_id, ()) for request_id in request_ids]
        counts = Counter(block_id for table in tables for block_id in table)
        for block_id in less:
            counts.pop(block_id, None)
        return sum(self.pool.ref_count(i) == count for i, count in counts.items())

    def check_invariants(self) -> None:
        """Assert the pool's invariants and that all its references are in tables."""
        self.pool.check_invariants()
        counts = [0] * self.pool.num_blocks
        for table in self._tables.values():
            for block_id in table:
                counts[block_id] += 1
        held = [self.pool.ref_count(i) for i in range(self.pool.num_blocks)]
        assert counts == held, f"in tables {counts}, references {held}"
        empty = [request_id for request_id, table in self._tables.items() if not table]
        assert not empty, f"empty tables: {empty}"

    def request_ids(self) -> set[str]:
        """Return the requests that own a block."""
        return set(self._tables)
