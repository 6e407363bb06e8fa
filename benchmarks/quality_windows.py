"""Windows of a text through the model, with several caches side by side."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.quality_scores import Scores, score
from benchmarks.quality_setting import REFERENCE, Setting
from jaxkv.config import ModelConfig
from jaxkv.device.cache import KVCache, init_cache
from jaxkv.device.llama import Llama, Params, merge
from jaxkv.device.step import Tokens, forward

BLOCK_SIZE = 16
_TILE = 128  # positions whose logits are in memory at once


class Windows(NamedTuple):
    """How a text is cut: windows of so many tokens, each with nothing before it.

    Attributes:
        token_ids: int32 [windows, tokens].
        context: Tokens at the head of each window whose successors are not scored,
            except that of the last of them.
    """

    token_ids: np.ndarray
    context: int

    @property
    def num_scored(self) -> int:
        """Positions that are scored, in all windows."""
        windows, tokens = self.token_ids.shape
        return windows * (tokens - self.context)


def cut(token_ids: Sequence[int], *, tokens: int, window: int, context: int) -> Windows:
    """Cut the first tokens of a text into windows.

    Args:
        token_ids: The text's.
        tokens: How many of them; what does not fill a window is left out.
        window: Tokens of a window.
        context: See `Windows`.

    Raises:
        ValueError: The numbers do not fit each other or the text.
    """
    if not 1 <= context < window:
        raise ValueError(f"context {context} must be in [1, window {window})")
    if not window <= tokens:
        raise ValueError(f"tokens {tokens} must be at least window {window}")
    if tokens > len(token_ids):
        raise ValueError(f"tokens {tokens}, but the text has {len(token_ids)}")
    count = tokens // window
    used = np.asarray(token_ids[: count * window], np.int32)
    return Windows(used.reshape(count, window), context)


def score_windows(
    params: Params,
    config: ModelConfig,
    settings: Sequence[Setting],
    windows: Windows,
    progress: Callable[[int], object],
) -> tuple[list[Scores], np.ndarray]:
    """Score every window with every setting.

    A window is one step of one row: attention reads every key as stored, this step's
    too, so that it is what decoding token by token would compute.

    Args:
        params: The model's, in float32.
        config: The model's.
        settings: How K and V are stored.
        windows: The text.
        progress: Called with the number of tokens that have been computed.

    Returns:
        Scores of each setting, and the full-precision cache's negative
        log-probabilities; numpy arrays over all scored positions.
    """
    run = _step(config)
    caches = [_empty_cache(config, setting, windows) for setting in settings]
    reference_cache = _empty_cache(config, Setting(REFERENCE), windows)
    scored: list[list[Scores]] = [[] for _ in settings]
    reference_nll = []
    for token_ids in windows.token_ids:
        tokens = _one_row(token_ids)
        targets = token_ids[windows.context :]
        predicting = slice(windows.context - 1, -1)
        hidden, reference_cache = run(params, reference_cache, tokens)
        reference = _logprobs(config, params, hidden[predicting])
        chosen = np.asarray(reference)[np.arange(len(targets)), targets]
        reference_nll.append(-chosen)
        progress(len(token_ids))
        for index, cache in enumerate(caches):
            hidden, caches[index] = run(params, cache, tokens)
            scores = _scores(config, params, hidden[predicting], reference, targets)
            scored[index].append(jax.device_get(scores))
            progress(len(token_ids))
    return [_concatenate(parts) for parts in scored], np.concatenate(reference_nll)


def _concatenate(parts: Sequence[Scores]) -> Scores:
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _empty_cache(config: ModelConfig, setting: Setting, windows: Windows) -> KVCache:
    """A cache for one window, and the null block."""
    num_blocks = 1 + _blocks(windows.token_ids.shape[1])
    return init_cache(
        setting.cache_config(config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    )


def _one_row(token_ids: np.ndarray) -> Tokens:
    """One line that computes all its tokens, in blocks 1, 2, 3, ..."""
    length = len(token_ids)
    num_blocks = _blocks(length)
    place = jnp.arange(length, dtype=jnp.int32)
    return Tokens(
        token_ids=jnp.asarray(token_ids),
        positions=place,
        slot_mapping=BLOCK_SIZE + place,
        block_tables=1 + jnp.arange(num_blocks, dtype=jnp.int32)[None],
        kv_lens=jnp.asarray([length], jnp.int32),
        cu_q_lens=jnp.asarray([0, length], jnp.int32),
    )


def _step(config: ModelConfig) -> Callable[..., tuple[jax.Array, KVCache]]:
    """Return the jitted (params, cache, tokens) -> (hidden, cache), cache donated."""

    @functools.partial(jax.jit, donate_argnums=(1,))
    def step(params, cache, tokens):
        return forward(merge(config, params), cache, tokens)

    return step


@functools.partial(jax.jit, static_argnums=(0,))
def _logprobs(config, params, hidden):
    model = merge(config, params)
    return _by_tiles(lambda x: jax.nn.log_softmax(_logits(model, x)), hidden)


@functools.partial(jax.jit, static_argnums=(0,))
def _scores(config, params, hidden, reference, targets):
    model = merge(config, params)

    def one_position(arguments):
        hidden, reference, target = arguments
        return score(reference, _logits(model, hidden), target)

    return _by_tiles(one_position, (hidden, reference, targets))


def _logits(model: Llama, hidden: jax.Array) -> jax.Array:
    return model.logits(hidden[None])[0]


def _by_tiles(function, positions):
    return lax.map(function, positions, batch_size=_TILE)
