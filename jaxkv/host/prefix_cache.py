"""Blocks that were computed before: who finds them, who fills them, who waits.

A request finds the longest chain of published blocks that holds its first tokens. What
it computes itself is *pending* until its step is committed, and published then. Who
would compute a pending block too waits for it instead, so that requests which arrive
together compute a common prefix once.
"""

from collections.abc import Iterable, Sequence

from jaxkv.host.block_hash import BlockChain
from jaxkv.host.block_pool import BlockPool
from jaxkv.host.request import Request


class PrefixCache:
    """The digests of requests, against one `BlockPool`'s index.

    Without prefix caching in the pool it finds nothing and nobody waits.

    Attributes:
        num_queries: Prompt tokens of requests that were looked up, once each.
        num_hits: Those of them that were found.
    """

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.num_queries = 0
        self.num_hits = 0
        self._num_resets = 0
        self._pending: dict[bytes, Request] = {}

    def find(self, request: Request) -> list[int]:
        """Return the published blocks of the request's first tokens; takes none.

        At least one token is left to compute, since only that gives logits. A request
        that wants its prompt's log-probabilities finds nothing.
        """
        digests = self._digests_to_find(request)
        return self.pool.lookup(digests)

    def is_pending(self, request: Request, found: Sequence[int]) -> bool:
        """Whether the first block that a waiting request misses is being computed."""
        digests = self._digests_to_find(request)
        return len(found) < len(digests) and digests[len(found)] in self._pending

    def num_shared(self, request: Request, table: Sequence[int]) -> int:
        """Return how many of a running request's first blocks others hold too.

        So many will be found when it has given its own back.
        """
        num_computed = request.num_computed_tokens // self.pool.block_size
        found = self.find(request)[:num_computed]
        for place, block_id in enumerate(found):
            if self.pool.ref_count(block_id) == (block_id == table[place]):
                return place
        return len(found)

    def num_findable(self, request: Request, table: Sequence[int], first: int) -> int:
        """Return how many computed blocks from `first` on are its own and published.

        So many stay in the cache when it gives them back, until they are taken.
        """
        num_computed = request.num_computed_tokens // self.pool.block_size
        found = self.find(request)[first:num_computed]
        for count, block_id in enumerate(found):
            if block_id != table[first + count]:
                return count
        return len(found)

    def admit(self, request: Request, num_found: int) -> None:
        """Count what a request found, and note what it is going to compute.

        Of several outputs for one prompt only the first is counted.
        """
        if not self.pool.enable_prefix_caching:
            request.num_cached_tokens = 0
            return
        if request.source is not None and request.source.chain is not None:
            # Its first blocks are the source's, so what it publishes continues theirs,
            # also if there was a reset since.
            request.chain = request.source.chain.fork(request.num_source_tokens)
        if request.num_cached_tokens is None:
            hits = num_found * self.pool.block_size
            request.num_cached_tokens = hits
            if request.child == 0 and _may_find(request):
                self.num_hits += hits
                self.num_queries += request.num_prompt_tokens
        known = len(request.token_ids) // self.pool.block_size
        for digest in self._digests(request, known)[num_found:known]:
            self._pending.setdefault(digest, request)

    def publish(self, request: Request, table: Sequence[int], num_before: int) -> None:
        """Publish the blocks that a committed step has filled.

        Args:
            request: Its computed tokens are counted already.
            table: Its blocks.
            num_before: Its computed tokens before the step.
        """
        block_size = self.pool.block_size
        first, end = num_before // block_size, request.num_computed_tokens // block_size
        if first == end or not self.pool.enable_prefix_caching:
            return
        digests = self._digests(request, end)
        is_current = request.chain is not None and request.chain.root == self._root
        for place in range(first, end):
            if is_current:
                self.pool.publish(table[place], digests[place])
            self._drop_pending(request, digests[place])

    def withdraw(self, request: Request) -> None:
        """Note that a request stops computing, before its tokens are forgotten."""
        if request.chain is not None:
            first = request.num_computed_tokens // self.pool.block_size
            if request.swapped is not None:  # on its way in, so not computed yet
                first = 0
            for digest in request.chain.digests[first:]:
                self._drop_pending(request, digest)
            if request.chain.root != self._root and request.swapped is None:
                request.chain = None

    def reset(self, waiting: Iterable[Request]) -> None:
        """Forget every published block.

        Who runs goes on, and what it computes from now on is not published: its first
        blocks cannot be found any more.
        """
        self.pool.reset()
        self._pending.clear()
        self._num_resets += 1
        for request in waiting:
            request.chain = None

    @property
    def _root(self) -> bytes:
        if self._num_resets == 0:
            return self.pool.root
        return self.pool.root + b"reset" + self._num_resets.to_bytes(8, "little")

    def _digests_to_find(self, request: Request) -> Sequence[bytes]:
        if not (self.pool.enable_prefix_caching and _may_find(request)):
            return ()
        num_blocks = (len(request.token_ids) - 1) // self.pool.block_size
        return self._digests(request, num_blocks)[:num_blocks]

    def _digests(self, request: Request, num_blocks: int) -> list[bytes]:
        if request.chain is None:
            request.chain = BlockChain(
                self.pool.block_size,
                self._root,
                adapter=request.adapter,
                salt=request.cache_salt,
            )
        return request.chain.extend(request.token_ids, num_blocks)

    def _drop_pending(self, request: Request, digest: bytes) -> None:
        if self._pending.get(digest) is request:
            del self._pending[digest]

    def check_invariants(self, running: Sequence[Request]) -> None:
        """Assert that what is pending belongs to somebody who runs."""
        for digest, request in self._pending.items():
            assert request in running, f"{request!r} does not run, {digest.hex()}"


def _may_find(request: Request) -> bool:
    return request.sampling_params.prompt_logprobs is None
