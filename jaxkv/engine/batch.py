"""From a `Schedule` to a padded `Batch`: buckets, staging arrays, value checks.

Inside jit nothing raises: an index out of range is clamped, dropped or wraps around.
So every value is checked here, on the host, before the step.
"""

# Batch and StepOutput hold numpy arrays on this side of the step, jax.Array inside it.
# pyright: reportArgumentType=false

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv.config import NULL_BLOCK
from jaxkv.device.sampling import MAX_SUPPRESSED, SamplingInputs
from jaxkv.device.step import Batch
from jaxkv.host.request import Request
from jaxkv.host.schedule import Schedule, ScheduledRow


class Bucket(NamedTuple):
    """The shape of a compiled step."""

    rows: int
    tokens: int


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


class BatchBuilder:
    """Makes each step's `Batch`; the only state is what all batches share."""

    def __init__(
        self,
        *,
        buckets: tuple[Bucket, ...],
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
    ):
        self.buckets = buckets
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.table_width = -(-max_model_len // block_size)

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
    ) -> Batch:
        """Stage one step's arrays; all fresh, since on CPU a device array may alias.

        Args:
            schedule: At least one row.
            table_of: A request's blocks, by request id.
            key_of: A request's random key data, by request id.

        Raises:
            ValueError: A value would go astray on the device.
        """
        rows = schedule.rows
        bucket = self.bucket_for([row.num_tokens for row in rows])
        token_ids = np.zeros(bucket.tokens, np.int32)
        positions = np.zeros(bucket.tokens, np.int32)
        slot_mapping = np.zeros(bucket.tokens, np.int32)
        block_tables = np.full((bucket.rows, self.table_width), NULL_BLOCK, np.int32)
        kv_lens = np.zeros(bucket.rows, np.int32)
        cu_q_lens = np.zeros(bucket.rows + 1, np.int32)
        sample_indices = np.zeros(bucket.rows, np.int32)
        begin = 0
        for line, row in enumerate(rows):
            end = begin + row.num_tokens
            kv_len = row.start + row.num_tokens
            table = np.asarray(table_of(row.request.request_id), np.int32)
            token_ids[begin:end] = row.request.token_ids[row.start : kv_len]
            positions[begin:end] = np.arange(row.start, kv_len, dtype=np.int32)
            self._check_table(row, table)
            place = positions[begin:end]
            slot_mapping[begin:end] = (
                table[place // self.block_size] * self.block_size
                + place % self.block_size
            )
            block_tables[line, : len(table)] = table
            kv_lens[line] = kv_len
            cu_q_lens[line + 1] = end
            sample_indices[line] = end - 1
            begin = end
        cu_q_lens[len(rows) + 1 :] = begin
        self._check_values(token_ids, slot_mapping[:begin])
        targets, wants_prompt_logprobs = _prompt_targets(rows, bucket.tokens)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            sample_indices=sample_indices,
            prompt_targets=targets,
            wants_prompt_logprobs=np.asarray(wants_prompt_logprobs),
            sampling=self._sampling_inputs(rows, bucket.rows, key_of),
        )

    def empty(self, bucket: Bucket) -> Batch:
        """Return a batch of padding only: what a bucket's arrays look like."""
        rows, tokens = bucket
        return Batch(
            token_ids=np.zeros(tokens, np.int32),
            positions=np.zeros(tokens, np.int32),
            slot_mapping=np.zeros(tokens, np.int32),
            block_tables=np.full((rows, self.table_width), NULL_BLOCK, np.int32),
            kv_lens=np.zeros(rows, np.int32),
            cu_q_lens=np.zeros(rows + 1, np.int32),
            sample_indices=np.zeros(rows, np.int32),
            prompt_targets=np.zeros(tokens, np.int32),
            wants_prompt_logprobs=np.asarray(False),
            sampling=self._sampling_inputs((), rows, _no_key),
        )

    def _check_table(self, row: ScheduledRow, table: np.ndarray) -> None:
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
        if table.min() <= NULL_BLOCK or table.max() >= self.num_blocks:
            raise ValueError(
                f"request {request_id!r} has block ids outside [1, "
                f"{self.num_blocks - 1}]: {table.tolist()}"
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

    def _sampling_inputs(
        self,
        rows: tuple[ScheduledRow, ...],
        num_rows: int,
        key_of: Callable[[str], np.ndarray],
    ) -> SamplingInputs:
        """Stage what the rows' SamplingParams say; padding rows are greedy."""
        lines = _SamplingLines(num_rows, self.vocab_size)
        penalised = []
        for line, row in enumerate(rows):
            if row.samples:
                lines.fill(line, row.request, key_of)
                if _has_penalty(row.request):
                    penalised.append((line, row.request))
        if penalised:
            history = np.zeros((num_rows, self.max_model_len), np.int32)
            for line, request in penalised:
                history[line, : len(request.token_ids)] = request.token_ids
        else:
            history = _no_history(num_rows, self.max_model_len)
        return SamplingInputs(
            temperature=lines.reals[0],
            top_k=lines.top_k,
            top_p=lines.reals[1],
            min_p=lines.reals[2],
            repetition_penalty=lines.reals[3],
            presence_penalty=lines.reals[4],
            frequency_penalty=lines.reals[5],
            keys=lines.keys,
            positions=lines.positions,
            history=history,
            history_lens=lines.history_lens,
            prompt_lens=lines.prompt_lens,
            suppressed_ids=lines.suppressed_ids,
            wants_logprobs=np.asarray(lines.wants_logprobs),
        )


class _SamplingLines:
    """The staging arrays of `SamplingInputs`, one line a row."""

    def __init__(self, num_rows: int, vocab_size: int):
        # temperature, top_p, min_p, repetition, presence and frequency penalty
        self.reals = np.zeros((6, num_rows), np.float32)
        self.reals[1] = self.reals[3] = 1.0
        self.top_k = np.zeros(num_rows, np.int32)
        self.keys = np.zeros((num_rows, 2), np.uint32)
        self.positions = np.zeros(num_rows, np.int32)
        self.history_lens = np.zeros(num_rows, np.int32)
        self.prompt_lens = np.zeros(num_rows, np.int32)
        self.suppressed_ids = np.full((num_rows, MAX_SUPPRESSED), vocab_size, np.int32)
        self.wants_logprobs = False

    def fill(
        self, line: int, request: Request, key_of: Callable[[str], np.ndarray]
    ) -> None:
        """Write one request's parameters."""
        params = request.sampling_params
        self.reals[:, line] = (
            0.0 if params.is_greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.top_k[line] = min(max(params.top_k, 0), 2**31 - 1)
        if not params.is_greedy:
            self.keys[line] = key_of(request.request_id)
        self.positions[line] = len(request.token_ids)
        self.history_lens[line] = len(request.token_ids)
        self.prompt_lens[line] = request.num_prompt_tokens
        if request.num_output_tokens < params.min_tokens:
            ids = sorted(request.stop_token_ids)
            self.suppressed_ids[line, : len(ids)] = ids
        self.wants_logprobs |= params.logprobs is not None


def _has_penalty(request: Request) -> bool:
    params = request.sampling_params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _no_key(request_id: str) -> np.ndarray:
    raise AssertionError(f"a batch of padding asked for the key of {request_id!r}")


@functools.lru_cache(maxsize=32)
def _no_history(num_rows: int, width: int) -> np.ndarray:
    """Return the history of rows without penalties; shared, so never written to."""
    history = np.zeros((num_rows, width), np.int32)
    history.flags.writeable = False
    return history


def _prompt_targets(
    rows: tuple[ScheduledRow, ...], num_tokens: int
) -> tuple[np.ndarray, bool]:
    """Return each token's successor in its prompt, where somebody asks for it."""
    targets = np.zeros(num_tokens, np.int32)
    wanted = False
    begin = 0
    for row in rows:
        if wants_prompt_logprobs(row):
            prompt = row.request.prompt_token_ids
            following = prompt[row.start + 1 : row.start + 1 + row.num_tokens]
            targets[begin : begin + len(following)] = following
            wanted = True
        begin += row.num_tokens
    return targets, wanted


def wants_prompt_logprobs(row: ScheduledRow) -> bool:
    """Whether this row's part of the step has prompt log-probabilities to give."""
    request = row.request
    return (
        request.sampling_params.prompt_logprobs is not None
        and request.child == 0
        and row.start < request.num_prompt_tokens - 1
    )
