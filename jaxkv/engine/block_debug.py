"""What every slot of the cache holds, kept on the host: `BlockDebugger`.

Blocks are shared, copied, swapped and reused; one wrong entry in a block table gives a
request somebody else's keys, and nothing but odd tokens shows it. With
`EngineConfig(debug_blocks=True)` a shadow of the cache follows every move, and before
each step whatever attention is about to read is compared with what the request needs.
Blocks that hold nothing are filled with NaN, so that what reads them all the same
cannot go unnoticed.
"""

import hashlib
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from jaxkv.config import NULL_BLOCK
from jaxkv.engine.runner import Runner
from jaxkv.host.block_hash import block_hashes
from jaxkv.host.request import Request
from jaxkv.host.schedule import Schedule, ScheduledRow
from jaxkv.host.scheduler import Scheduler
from jaxkv.host.swap_space import SwappedBlocks

# What a slot holds: nothing since its block was handed out, nothing since its block
# was given back, or the token described by the other fields.
_BLANK, _RELEASED, _WRITTEN = range(3)
_SLOT = np.dtype(
    [
        ("state", np.uint8),
        ("digest", np.int64),  # of all tokens up to this one, adapter and salt
        ("position", np.int32),
        ("token", np.int64),
    ]
)


class _Write(NamedTuple):
    """Slots that a step writes for a row."""

    row: ScheduledRow
    block_ids: np.ndarray
    offsets: np.ndarray


class BlockDebugger:
    """The shadow of a cache, and which blocks must be filled with NaN.

    Use, in every step: `check` when it is scheduled; `fill` when blocks were swapped
    out and before any is written; `follow` when it is dispatched; `finish` when it, or
    an earlier one, is committed; or `discard` if it failed: what it may have written
    is held for nothing. Which tokens a step has written may turn out only when an
    earlier one is committed; their slots hold nothing until then.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner):
        """Know nothing of what the runner's cache holds: all of it is garbage."""
        pool = scheduler.pool
        self._scheduler = scheduler
        self._runner = runner
        self._slots = np.zeros((pool.num_blocks, pool.block_size), _SLOT)
        # Blocks that may hold something else than NaN.
        self._dirty = set(range(NULL_BLOCK + 1, pool.num_blocks))
        self._swapped: WeakKeyDictionary[SwappedBlocks, np.ndarray]
        self._swapped = WeakKeyDictionary()
        self._needed: WeakKeyDictionary[Request, _NeededSlots] = WeakKeyDictionary()
        # Of this step: blocks to fill, and what is going to be written.
        self._released: list[int] = []
        self._taken: list[int] = []
        self._writes: list[_Write] = []
        # Written, as far as it is not known yet what.
        self._unknown: list[_Write] = []
        # Blocks that this step swaps in or copies to; if it fails, kept for the next.
        self._moved: list[int] = []

    def check(self, schedule: Schedule) -> None:
        """Compare what a step is going to read and write with what it should.

        Raises:
            AssertionError: A request would read something else than its own tokens,
                or write over something; nothing has run yet.
        """
        self._slots["state"][self._moved] = _BLANK  # the last step failed
        for swapped, block_ids in schedule.swap_outs:
            self._swapped[swapped] = self._slots[list(block_ids)]
        self._clear(schedule)
        self._move(schedule)
        self._writes = [self._check_row(row) for row in schedule.rows]
        self._blank(self._writes)

    def fill(self) -> None:
        """Fill with NaN what is free, and what was handed out and holds nothing yet."""
        if self._released or self._taken:
            self._runner.poison_blocks(self._released + self._taken)
            self._dirty.difference_update(self._released)

    def follow(self, schedule: Schedule) -> None:
        """Note what the step that was checked last writes."""
        assert len(self._writes) == len(schedule.rows), "another step was checked"
        self._unknown += self._writes
        self._writes = []
        self._moved = []
        self._note_known()

    def finish(self) -> None:
        """Note what has become known, and check the scheduler's invariants."""
        self._note_known()
        self._scheduler.check_invariants()

    def discard(self, schedule: Schedule) -> None:
        """Forget what a step has written, before its blocks are given back."""
        rows = [row for row in schedule.rows if not row.is_stale]
        self._unknown = [write for write in self._unknown if write.row not in rows]
        for row in rows:
            end = row.start + row.num_tokens
            self._blank([self._write_of(row, row.start, end)])

    def _note_known(self) -> None:
        """Let slots hold their tokens where these are known by now."""
        unknown = []
        for write in self._unknown:
            row = write.row
            if row.is_stale:
                continue
            start = row.start + row.num_tokens - len(write.block_ids)
            known = self._needed_by(row.request)[start : row.start + row.num_tokens]
            count = len(known)
            self._slots[write.block_ids[:count], write.offsets[:count]] = known
            rest = write.block_ids[count:], write.offsets[count:]
            if len(rest[0]):
                unknown.append(_Write(row, *rest))
        self._unknown = unknown

    def _blank(self, writes: Iterable[_Write]) -> None:
        for write in writes:
            self._slots["state"][write.block_ids, write.offsets] = _BLANK

    def _write_of(self, row: ScheduledRow, start: int, end: int) -> _Write:
        """Return the slots of a row's tokens [start, end)."""
        places, offsets = np.divmod(np.arange(start, end), self._slots.shape[1])
        return _Write(row, np.asarray(self._table(row.request))[places], offsets)

    def _needed_by(self, request: Request) -> np.ndarray:
        """Return what the slots of a request's known tokens must hold."""
        if request not in self._needed:
            self._needed[request] = _NeededSlots(request)
        return self._needed[request].of(request.token_ids)

    def _table(self, request: Request) -> list[int]:
        return self._scheduler.block_tables.table(request.request_id)

    def _clear(self, schedule: Schedule) -> None:
        """Empty the slots of free blocks, and of those that were just handed out."""
        # The holder of a block to be copied may have given it back a moment ago.
        sources = {source for source, _ in schedule.copies}
        new = self._new_blocks(schedule) - sources
        pool = self._scheduler.pool
        self._taken = sorted(self._dirty & new)
        self._released = sorted(
            i for i in self._dirty - new - sources if pool.is_free(i)
        )
        self._dirty |= new
        states = self._slots["state"]
        states[sorted(new)] = _BLANK
        # What was written before stays there, to be named.
        states[self._released] = np.minimum(states[self._released], _RELEASED)

    def _new_blocks(self, schedule: Schedule) -> set[int]:
        """Return the blocks that this step is the first to write for their holders."""
        new = set(_moved(schedule))
        for row in schedule.rows:
            num_before = self._scheduler.block_tables.blocks_for(row.start)
            new.update(self._table(row.request)[num_before:])
        return new

    def _move(self, schedule: Schedule) -> None:
        """Let the shadow follow what is swapped in and copied."""
        for swapped, block_ids in schedule.swap_ins:
            assert swapped in self._swapped, f"{swapped!r} was never swapped out"
            content = self._swapped[swapped]
            for block_id, slots in zip(block_ids, content, strict=True):
                if block_id != NULL_BLOCK:
                    self._slots[block_id] = slots
        if schedule.copies:
            sources, targets = zip(*schedule.copies, strict=True)
            self._slots[list(targets)] = self._slots[list(sources)]
        # What came along behind a request's own tokens is going to be overwritten.
        self._moved = _moved(schedule)
        for row in schedule.rows:
            place, offset = divmod(row.start, self._slots.shape[1])
            table = self._table(row.request)
            if offset and table[place] in self._moved:
                self._slots["state"][table[place], offset:] = _BLANK

    def _check_row(self, row: ScheduledRow) -> _Write:
        """Check a row's slots; return what it writes."""
        request, start = row.request, row.start
        end = start + row.num_tokens
        known = self._needed_by(request)[:end]
        needed = np.zeros(end, _SLOT)
        needed[: len(known)] = known
        _, block_ids, offsets = self._write_of(row, 0, end)
        found = self._slots[block_ids, offsets]
        wrong = found != needed
        # Chosen and written in a step under way, and not followed yet.
        wrong[len(known) : start] = found["state"][len(known) : start] != _BLANK
        wrong[start:] = found["state"][start:] == _WRITTEN
        if wrong.any():
            position = int(wrong.argmax())
            token = [*request.token_ids, *["to come"] * end][position]
            raise AssertionError(
                f"request {request.request_id!r} would "
                f"{'read' if position < start else 'write'} position {position}, token "
                f"{token}, in block {block_ids[position]}, "
                f"offset {offsets[position]}, but there is "
                f"{_describe(found[position], needed[position])}"
            )
        return _Write(row, block_ids[start:], offsets[start:])


def _moved(schedule: Schedule) -> list[int]:
    """Return the blocks that a step swaps in or copies from others."""
    swapped_in = (i for _, block_ids in schedule.swap_ins for i in block_ids)
    copied = (target for _, target in schedule.copies)
    return [i for i in (*swapped_in, *copied) if i != NULL_BLOCK]


def _describe(found: np.void, needed: np.void) -> str:
    """Say what is in a slot, as against what must be there."""
    if found["state"] == _BLANK:
        return "nothing: never written"
    what = f"position {found['position']}, token {found['token']}"
    if found["state"] == _RELEASED:
        return f"nothing: released, once {what}"
    if found[["position", "token"]] == needed[["position", "token"]]:
        return f"{what}, after other tokens or with another salt or adapter"
    return what


class _NeededSlots:
    """What the slots of one request's tokens must hold, extended as tokens come."""

    def __init__(self, request: Request):
        adapter, salt = request.adapter, request.cache_salt
        (key,) = block_hashes([0], 1, adapter=adapter, salt=salt)
        digest = hashlib.sha256(key).digest()
        self._root = int.from_bytes(digest[:8], "little", signed=True)
        self._token_ids: list[int] = []
        self._slots = np.zeros(0, _SLOT)

    def of(self, token_ids: list[int]) -> np.ndarray:
        """Return the slots of all its tokens."""
        num_known = len(self._token_ids)
        if token_ids[:num_known] != self._token_ids:  # it is another beam now
            num_known = 0
        if num_known < len(token_ids):
            known = self._slots[:num_known]
            digest = int(known["digest"][-1]) if num_known else self._root
            new = _slots_of(token_ids[num_known:], digest, num_known)
            self._slots = np.concatenate([known, new])
            self._token_ids = list(token_ids)
        return self._slots


def _slots_of(token_ids: Iterable[int], digest: int, position: int) -> np.ndarray:
    """Return the slots of tokens from a position on, behind tokens of that digest."""
    tokens = np.fromiter(token_ids, np.int64)
    slots = np.zeros(len(tokens), _SLOT)
    digests = accumulate(
        tokens.tolist(), lambda before, token: hash((before, token)), initial=digest
    )
    slots["state"] = _WRITTEN
    slots["digest"] = list(digests)[1:]
    slots["position"] = np.arange(position, position + len(tokens))
    slots["token"] = tokens
    return slots
