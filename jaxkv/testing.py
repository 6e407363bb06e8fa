"""Toy models for tests, users' and ours: seeded, tiny, and run like real ones."""

# Batch and StepOutput hold numpy arrays on this side of the step, jax.Array inside it.
# pyright: reportArgumentType=false

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.config import EngineConfig, ModelConfig
from jaxkv.device.llama import init_params
from jaxkv.device.sampling import MAX_LOGPROBS, Logprobs
from jaxkv.device.step import Batch, StepOutput
from jaxkv.engine.checks import EngineLimits
from jaxkv.engine.engine import Engine

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
    runner = _ScriptedRunner(next_token, config.num_blocks, config.block_size)
    return Engine(runner, limits, config, tokenizer)


class _ScriptedRunner:
    """A device whose cache holds token ids instead of keys and values."""

    def __init__(
        self, next_token: Callable[[list[int]], int], num_blocks: int, block_size: int
    ):
        self.num_compilations = 0
        self.compile_seconds = 0.0
        self._next_token = next_token
        self._slots = np.full((num_blocks, block_size), -1, np.int64)

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

    def execute(self, batch: Batch) -> StepOutput:
        """Write the batch's tokens to their slots and read back every row's."""
        self._slots.reshape(-1)[batch.slot_mapping] = batch.token_ids
        rows = len(batch.kv_lens)
        token_ids = np.zeros(rows, np.int32)
        logprobs = _no_logprobs(rows)
        for row in range(rows):
            if batch.cu_q_lens[row + 1] > batch.cu_q_lens[row]:
                tokens = self._slots[batch.block_tables[row]].reshape(-1)
                seen = tokens[: batch.kv_lens[row]].tolist()
                token_ids[row] = self._next_token(seen)
                logprobs.top_ids[row] = token_ids[row] + np.arange(MAX_LOGPROBS)
                logprobs.top[row] = -np.log(2) * np.arange(1, MAX_LOGPROBS + 1)
                logprobs.chosen[row] = logprobs.top[row, 0]
        return StepOutput(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=_no_logprobs(len(batch.token_ids)),
        )


def _no_logprobs(rows: int) -> Logprobs:
    return Logprobs(
        chosen=np.zeros(rows, np.float32),
        top_ids=np.zeros((rows, MAX_LOGPROBS), np.int32),
        top=np.zeros((rows, MAX_LOGPROBS), np.float32),
    )
