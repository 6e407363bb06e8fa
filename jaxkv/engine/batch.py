"""From a `Schedule` to a padded `Batch`: buckets, staging arrays, value checks.

What the device knows of a row already is left out: a row is set when a request gets
it, and from then on only new blocks of its table are sent.

Inside jit nothing raises: an index out of range is clamped, dropped or wraps around.
So every value is checked here, on the host, before the step.
"""

# Batch and StepOutput hold numpy arrays on this side of the step, jax.Array inside it.
# pyright: reportArgumentType=false

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv.config import NULL_BLOCK
from jaxkv.device.rows import RowParams
from jaxkv.device.sampling import MAX_STOP_IDS
from jaxkv.device.step import Batch
from jaxkv.host.request import Request
from jaxkv.host.schedule import Schedule, ScheduledRow


class Bucket(NamedTuple):
    """The shape of a compiled step."""

    rows: int
    tokens: int


Ladder = Callable[[int, int], tuple[Bucket, ...]]
"""(max_num_seqs, max_num_batched_tokens) -> the shapes to compile, small ones first."""


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """List the shapes that steps are padded to: by tokens, then by rows.

    - As many tokens as rows, up to max_num_seqs: decoding. They double up to 16, where
      a product's time hardly depends on its rows; from there on they also stop half-way
      (16, 24, 32, 48, ...), since it does.
    - Half as many rows as tokens, by powers of two from 16 tokens to as many as above:
      short prompts and what the prefix cache leaves of long ones, beside a few
      decoding rows.
    - max_num_seqs rows and more tokens, by powers of two: prefill chunks.
    """
    rows = 1
    buckets = [Bucket(rows, rows)]
    while rows < max_num_seqs:
        is_power = rows & (rows - 1) == 0
        if rows < 16:
            rows *= 2
        else:
            rows = rows * 3 // 2 if is_power else rows * 4 // 3
        buckets.append(Bucket(rows, rows))
    tokens = 16
    while tokens <= rows:
        buckets.append(Bucket(tokens // 2, tokens))
        tokens *= 2
    tokens = rows
    while tokens < max_num_batched_tokens:
        tokens = 1 << tokens.bit_length()
        buckets.append(Bucket(rows, tokens))
    return tuple(sorted(buckets, key=lambda bucket: (bucket.tokens, bucket.rows)))


def few_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """List fewer shapes, for where padding costs little: see `dense.skips_padding`.

    - As many tokens as rows, by powers of two and max_num_seqs. Sampling is done for
      padding too, so these are not further apart.
    - max_num_seqs rows and more tokens, by powers of two.
    """
    rows = 1
    buckets = []
    while rows < max_num_seqs:
        buckets.append(Bucket(rows, rows))
        rows *= 2
    tokens = max_num_seqs
    buckets.append(Bucket(max_num_seqs, tokens))
    while tokens < max_num_batched_tokens:
        tokens = 1 << tokens.bit_length()
        buckets.append(Bucket(max_num_seqs, tokens))
    return tuple(buckets)


class NewRows(NamedTuple):
    """Rows that other requests have now: arguments of `set_rows` and `set_history`.

    Attributes:
        rows: Which.
        block_tables: Their tables, [rows, width].
        params: How their tokens are chosen, a line for each.
        histories: All tokens of those with a penalty, by row.
    """

    rows: list[int]
    block_tables: np.ndarray
    params: RowParams
    histories: dict[int, list[int]]


class BatchBuilder:
    """Makes each step's `Batch`, and remembers what the device knows of the rows."""

    def __init__(
        self,
        *,
        buckets: tuple[Bucket, ...],
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
    ):
        self.buckets = buckets
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.table_width = -(-max_model_len // block_size)
        # Of each row of which admission it is, and how many blocks were sent.
        self._known: dict[int, tuple[int, int]] = {}

    def variants(self, multi_step: int) -> list[tuple[Bucket, int]]:
        """List all steps to compile: buckets, each with its number of steps in one."""
        variants = [(bucket, 1) for bucket in self.buckets]
        if multi_step > 1:
            decoding = [b for b in self.buckets if b.rows == b.tokens]
            variants += [(bucket, multi_step) for bucket in decoding]
        return variants

    def bucket_for(self, q_lens: Sequence[int]) -> Bucket:
        """Return the bucket for rows of so many tokens.

        That is the smallest that holds them; but with as many rows as tokens attention
        takes each token for a row's only one, so that every token of a longer row reads
        its keys anew. So a batch with longer rows goes to the smallest bucket of fewer
        rows than tokens, unless that one's further padding is more than those rows.
        """
        num_rows, num_tokens = len(q_lens), sum(q_lens)
        holding = [b for b in self.buckets if b.rows >= num_rows]
        holding = [b for b in holding if b.tokens >= num_tokens]
        assert holding, f"no bucket holds {num_rows} rows and {num_tokens} tokens"
        smallest = holding[0]
        num_in_longer = sum(q_len for q_len in q_lens if q_len > 1)
        for bucket in holding:
            if bucket.tokens > smallest.tokens + num_in_longer:
                break
            if bucket.tokens > bucket.rows:
                return bucket
        return smallest

    def build(
        self,
        schedule: Schedule,
        table_of: Callable[[str], list[int]],
        key_of: Callable[[str], np.ndarray],
    ) -> tuple[NewRows, Batch]:
        """Stage one step's arrays; all fresh, since on CPU a device array may alias.

        Args:
            schedule: At least one row.
            table_of: A request's blocks, by request id.
            key_of: A request's random key data, by request id.

        Returns:
            The rows to set before the step, and the step. If either does not get to
            the device, call `forget`.

        Raises:
            ValueError: A value would go astray on the device.
        """
        single = schedule.num_steps > 1
        q_lens = [1 if single else row.num_tokens for row in schedule.rows]
        batch = self.empty(self.bucket_for(q_lens), schedule.num_steps)
        new_rows: list[tuple[ScheduledRow, list[int]]] = []
        new_blocks: list[tuple[int, int, int]] = []
        begin = 0
        for line, (row, q_len) in enumerate(zip(schedule.rows, q_lens, strict=True)):
            request, start = row.request, row.start
            end, kv_len = begin + q_len, start + q_len
            table = table_of(request.request_id)
            self._check_table(row, table)
            batch.rows[line] = row.row
            known = request.token_ids[start:kv_len]
            batch.token_ids[begin : begin + len(known)] = known
            if len(known) < q_len:  # the last token is on the device
                assert len(known) == q_len - 1, f"{row} runs past {request!r}"
                batch.pending_places[line] = end - 1
            self._place(batch, begin, start, kv_len, table)
            batch.kv_lens[line] = kv_len
            batch.cu_q_lens[line + 1] = end
            batch.sample_indices[line] = end - 1
            batch.num_samples[line] = row.num_samples
            num_known = self._num_known_blocks(row)
            if num_known is None:
                new_rows.append((row, table))
            else:
                places = range(num_known, len(table))
                new_blocks += [(row.row, place, table[place]) for place in places]
            self._known[row.row] = row.admission, len(table)
            params = request.sampling_params
            if row.num_samples and params.logprobs is not None:
                batch.wants_logprobs[...] = True
            begin = end
        batch.cu_q_lens[len(q_lens) + 1 :] = begin
        if new_blocks:
            batch.new_blocks[:, : len(new_blocks)] = np.transpose(new_blocks)
        self._check_values(batch.token_ids, batch.slot_mapping[:begin])
        self._fill_prompt_targets(batch, schedule.rows)
        return self._new_rows(new_rows, key_of), batch

    def no_rows(self, count: int) -> NewRows:
        """Return new rows that are nobody's: what their arrays look like."""
        block_tables = np.full((count, self.table_width), NULL_BLOCK, np.int32)
        params = _empty_params(count, self.vocab_size)
        return NewRows([self.max_num_seqs] * count, block_tables, params, {})

    def forget(self) -> None:
        """Take it that the device knows nothing of any row."""
        self._known.clear()

    def empty(self, bucket: Bucket, num_steps: int = 1) -> Batch:
        """Return a batch of padding only: what a bucket's arrays look like."""
        lines, tokens = bucket
        num_blocks = tokens * -(-num_steps // self.block_size)
        new_blocks = np.zeros((3, num_blocks), np.int32)
        new_blocks[0], new_blocks[1] = self.max_num_seqs, self.table_width
        return Batch(
            rows=np.full(lines, self.max_num_seqs, np.int32),
            token_ids=np.zeros(tokens, np.int32),
            pending_places=np.full(lines, tokens, np.int32),
            positions=np.zeros(tokens, np.int32),
            slot_mapping=np.zeros(tokens, np.int32),
            new_blocks=new_blocks,
            kv_lens=np.zeros(lines, np.int32),
            cu_q_lens=np.zeros(lines + 1, np.int32),
            sample_indices=np.zeros(lines, np.int32),
            num_samples=np.zeros(lines, np.int32),
            prompt_targets=np.zeros(tokens, np.int32),
            wants_prompt_logprobs=np.asarray(False),
            wants_logprobs=np.asarray(False),
        )

    def _place(
        self, batch: Batch, begin: int, start: int, end: int, table: list[int]
    ) -> None:
        """Say where the tokens [start, end) of a table are, and their K and V."""
        block_size = self.block_size
        if end - start == 1:
            block_id = table[start // block_size]
            batch.positions[begin] = start
            batch.slot_mapping[begin] = block_id * block_size + start % block_size
            return
        positions = np.arange(start, end, dtype=np.int32)
        first = start // block_size
        blocks = np.asarray(table[first : -(-end // block_size)], np.int32)
        lines = slice(begin, begin + end - start)
        batch.positions[lines] = positions
        batch.slot_mapping[lines] = (
            blocks[positions // block_size - first] * block_size
            + positions % block_size
        )

    def _num_known_blocks(self, row: ScheduledRow) -> int | None:
        """Return how much of its table the device has; None: it has another's."""
        admission, num_blocks = self._known.get(row.row, (None, 0))
        return num_blocks if admission == row.admission else None

    def _new_rows(
        self,
        rows: list[tuple[ScheduledRow, list[int]]],
        key_of: Callable[[str], np.ndarray],
    ) -> NewRows:
        """Stage what the device must know of rows with other requests."""
        new_rows = self.no_rows(len(rows))
        for line, (row, table) in enumerate(rows):
            new_rows.rows[line] = row.row
            new_rows.block_tables[line, : len(table)] = table
            _fill_params(new_rows.params, line, row.request, key_of)
            if _has_penalty(row.request):
                new_rows.histories[row.row] = row.request.token_ids
        return new_rows

    def _check_table(self, row: ScheduledRow, table: list[int]) -> None:
        """Check one row's blocks against its length and the pool."""
        kv_len = row.start + row.num_tokens
        request_id = row.request.request_id
        if kv_len > self.max_model_len:
            raise ValueError(
                f"request {request_id!r} reaches position {kv_len - 1}, but "
                f"max_model_len is {self.max_model_len}"
            )
        if len(table) * self.block_size < kv_len or len(table) > self.table_width:
            raise ValueError(
                f"request {request_id!r} attends to {kv_len} tokens, but its block "
                f"table has {len(table)} blocks of {self.block_size} (at most "
                f"{self.table_width})"
            )
        # Those before its first token were checked when they were new.
        new = table[row.start // self.block_size :]
        if self._num_known_blocks(row) is None:
            new = table
        if min(new) <= NULL_BLOCK or max(new) >= self.num_blocks:
            raise ValueError(
                f"request {request_id!r} has block ids outside [1, "
                f"{self.num_blocks - 1}]: {table}"
            )

    def _check_values(self, token_ids: np.ndarray, slots: np.ndarray) -> None:
        """Check the tokens, and that no two of them share a slot."""
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise ValueError(
                f"token ids outside the vocabulary of {self.vocab_size}: "
                f"{token_ids.min()} to {token_ids.max()}"
            )
        if len(np.unique(slots)) != len(slots):
            raise ValueError("two tokens of one step would be written to one slot")

    def _fill_prompt_targets(
        self, batch: Batch, rows: tuple[ScheduledRow, ...]
    ) -> None:
        """Say each token's successor in its prompt, where somebody asks for it."""
        begin = 0
        for row in rows:
            if wants_prompt_logprobs(row):
                prompt = row.request.prompt_token_ids
                following = prompt[row.start + 1 : row.start + 1 + row.num_tokens]
                batch.prompt_targets[begin : begin + len(following)] = following
                batch.wants_prompt_logprobs[...] = True
            begin += row.num_tokens


def _empty_params(lines: int, vocab_size: int) -> RowParams:
    """Return what padding has: greedy, and nothing else."""

    def every(value: float) -> np.ndarray:
        return np.full(lines, value, np.float32)

    return RowParams(
        temperature=every(0.0),
        top_k=np.zeros(lines, np.int32),
        top_p=every(1.0),
        min_p=every(0.0),
        repetition_penalty=every(1.0),
        presence_penalty=every(0.0),
        frequency_penalty=every(0.0),
        keys=np.zeros((lines, 2), np.uint32),
        prompt_lens=np.zeros(lines, np.int32),
        min_lens=np.zeros(lines, np.int32),
        stop_ids=np.full((lines, MAX_STOP_IDS), vocab_size, np.int32),
    )


def _fill_params(
    arrays: RowParams,
    line: int,
    request: Request,
    key_of: Callable[[str], np.ndarray],
) -> None:
    """Write one request's parameters."""
    params = request.sampling_params
    arrays.temperature[line] = 0.0 if params.is_greedy else params.temperature
    arrays.top_k[line] = min(max(params.top_k, 0), 2**31 - 1)
    arrays.top_p[line] = params.top_p
    arrays.min_p[line] = params.min_p
    arrays.repetition_penalty[line] = params.repetition_penalty
    arrays.presence_penalty[line] = params.presence_penalty
    arrays.frequency_penalty[line] = params.frequency_penalty
    if not params.is_greedy:
        arrays.keys[line] = key_of(request.request_id)
    arrays.prompt_lens[line] = request.num_prompt_tokens
    arrays.min_lens[line] = request.num_prompt_tokens + params.min_tokens
    # More of them than there is room for are seen by the host only.
    stop_ids = sorted(request.stop_token_ids)[:MAX_STOP_IDS]
    arrays.stop_ids[line, : len(stop_ids)] = stop_ids


def _has_penalty(request: Request) -> bool:
    params = request.sampling_params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def wants_prompt_logprobs(row: ScheduledRow) -> bool:
    """Whether this row's part of the step has prompt log-probabilities to give."""
    request = row.request
    return (
        request.sampling_params.prompt_logprobs is not None
        and request.child == 0
        and row.start < request.num_prompt_tokens - 1
    )
