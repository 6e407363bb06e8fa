"""Toy models for tests, users' and ours: seeded, tiny, and run like real ones."""

# Batch and StepOutput hold numpy arrays on this side of the step, jax.Array inside it.
# pyright: reportArgumentType=false

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.config import EngineConfig, ModelConfig
from jaxkv.device.llama import init_params
from jaxkv.device.sampling import MAX_LOGPROBS, MAX_STOP_IDS, Logprobs
from jaxkv.device.step import Batch, StepOutput
from jaxkv.engine.batch import BatchBuilder, NewRows
from jaxkv.engine.checks import EngineLimits
from jaxkv.engine.engine import Engine, make_builder

SCRIPTED_VOCAB_SIZE = 2**20


def tiny_llama(
    seed: int = 0, **dimensions: Any
) -> tuple[dict[str, jax.Array], ModelConfig]:
    """Make a Llama of a few thousand random parameters, the same on every machine.

    Args:
        seed: Of the parameters.
        **dimensions: Any field of `ModelConfig`, by Hugging Face's names.

    Returns:
        Parameters by dotted name, and the config.
    """
    defaults: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    config = ModelConfig(**(defaults | dimensions))
    return init_params(config, seed), config


def scripted_engine(
    next_token: Callable[[list[int]], int],
    config: EngineConfig,
    tokenizer: Any | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> Engine:
    """Make an engine whose "model" is a function of the tokens so far.

    The tokens so far are read from a pool of slots through the block tables, as a
    model reads keys: an engine that loses or mixes up blocks shows in the tokens. The
    next token has a probability of 1/2, the id after it 1/4, and so on.

    Args:
        next_token: From prompt and output so far to the next token.
        config: `num_blocks` and `max_model_len` must be given.
        tokenizer: As for `Engine`.
        eos_token_ids: Ids that end generation.
    """
    if config.num_blocks is None or config.max_model_len is None:
        raise ValueError("scripted_engine needs num_blocks and max_model_len")
    limits = EngineLimits(
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        vocab_size=SCRIPTED_VOCAB_SIZE,
        num_token_ids=SCRIPTED_VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
        kv_bytes_per_token=8,  # one int64 token id
    )
    builder = make_builder(limits, config)
    runner = _ScriptedRunner(next_token, builder)
    return Engine(runner, builder, limits, config, tokenizer)


class _ScriptedRunner:
    """A device whose cache holds token ids instead of keys and values."""

    def __init__(self, next_token: Callable[[list[int]], int], builder: BatchBuilder):
        self.num_compilations = 0
        self.compile_seconds = 0.0
        self._next_token = next_token
        lines, width = builder.max_num_seqs + 1, builder.table_width
        self._slots = np.full((builder.num_blocks, builder.block_size), -1, np.int64)
        self._tables = np.zeros((lines, width), np.int32)
        self._last_tokens = np.full(lines, -1, np.int64)
        self._min_lens = np.zeros(lines, np.int32)
        self._stop_ids = np.zeros((lines, MAX_STOP_IDS), np.int32)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all read before any is written."""
        sources, targets = zip(*copies, strict=True)
        self._slots[list(targets)] = self._slots[list(sources)]

    def swap_out(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return the tokens of whole blocks."""
        return self._slots[list(block_ids)]

    def swap_in(self, content: np.ndarray, block_ids: Sequence[int]) -> None:
        """Put them back, to other blocks."""
        self._slots[list(block_ids)] = content

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrite the tokens of whole blocks with what is none."""
        self._slots[list(block_ids)] = -1

    def set_rows(self, new_rows: NewRows) -> None:
        """Give rows to other requests; the last tokens of these are not known."""
        self._tables[new_rows.rows] = new_rows.block_tables
        self._min_lens[new_rows.rows] = new_rows.params.min_lens
        self._stop_ids[new_rows.rows] = new_rows.params.stop_ids

    def dispatch(self, batch: Batch, num_steps: int = 1) -> StepOutput:
        """Write the batch's tokens to their slots and read back every row's."""
        rows, places, block_ids = batch.new_blocks
        is_new = places < self._tables.shape[1]
        self._tables[rows[is_new], places[is_new]] = block_ids[is_new]
        token_ids = batch.token_ids.astype(np.int64)
        pending = batch.pending_places < len(token_ids)
        last = self._last_tokens[batch.rows[pending]]
        token_ids[batch.pending_places[pending]] = last
        self._slots.reshape(-1)[batch.slot_mapping] = token_ids
        lines = len(batch.rows)
        chosen = np.zeros((num_steps, lines), np.int32)
        for line in np.flatnonzero(np.diff(batch.cu_q_lens)):
            row, kv_len = batch.rows[line], batch.kv_lens[line]
            for step in range(max(1, batch.num_samples[line])):
                if step > 0:
                    token = chosen[step - 1, line]
                    is_past_minimum = kv_len >= self._min_lens[row]
                    if token in self._stop_ids[row] and is_past_minimum:
                        break
                    place, offset = divmod(kv_len, self._slots.shape[1])
                    self._slots[self._tables[row, place], offset] = token
                    kv_len += 1
                seen = self._slots[self._tables[row]].reshape(-1)[:kv_len]
                chosen[step, line] = self._next_token(seen.tolist())
                if batch.num_samples[line]:
                    self._last_tokens[row] = chosen[step, line]
        ranks = np.arange(MAX_LOGPROBS)
        top = np.broadcast_to(
            (-np.log(2) * (1 + ranks)).astype(np.float32), (*chosen.shape, len(ranks))
        )
        return StepOutput(
            token_ids=chosen,
            logprobs=Logprobs(top[..., 0], chosen[..., None] + ranks, top),
            prompt_logprobs=Logprobs(
                np.zeros(len(token_ids), np.float32),
                np.zeros((len(token_ids), MAX_LOGPROBS), np.int32),
                np.zeros((len(token_ids), MAX_LOGPROBS), np.float32),
            ),
        )

    def collect(self, dispatched: StepOutput) -> StepOutput:
        """Return the step, which is done already."""
        return dispatched
