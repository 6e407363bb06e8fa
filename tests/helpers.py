"""Shared by tests: the only tolerances, random paged cases, a dense decoder."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import NULL_BLOCK, CacheConfig
from jaxkv.device.cache import KVCache, LayerKV, init_cache, write_kv
from tests.low_bit import decoded

FIXTURES = Path(__file__).parent / "fixtures"

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest absolute difference of attention outputs, by the dtype of the cache."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Rows of (q_len, kv_len), heads and blocks."""

    rows: tuple[tuple[int, int], ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    padding_rows: int = 0
    padding_tokens: int = 0

    @property
    def name(self):
        rows = ",".join(f"{q}of{kv}" for q, kv in self.rows)
        shape = f"h{self.q_heads}/{self.kv_heads}-d{self.head_dim}-b{self.block_size}"
        return f"{rows}-{shape}"


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """A one-layer cache that holds random keys, and queries over it."""

    q: np.ndarray
    cache: KVCache
    block_tables: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    keys: list[np.ndarray]  # per row [kv_len, kv_heads, head_dim], as stored
    values: list[np.ndarray]

    def arguments(self):
        return {
            "block_tables": jnp.asarray(self.block_tables),
            "kv_lens": jnp.asarray(self.kv_lens),
            "cu_q_lens": jnp.asarray(self.cu_q_lens),
        }


def random_paged_case(workload, seed=0, dtype="float32", unused=np.nan):
    """Build a case whose blocks lie in random order and hold `unused` elsewhere."""
    rng = np.random.default_rng(seed)
    w = workload
    num_rows = len(w.rows) + w.padding_rows
    blocks_of = [-(-kv_len // w.block_size) for _, kv_len in w.rows]
    num_blocks = sum(blocks_of) + 4
    width = max([*blocks_of, 1]) + 1
    shape = (num_blocks, w.kv_heads, w.block_size, w.head_dim)
    k_blocks, v_blocks = (np.full(shape, unused, np.float32) for _ in range(2))
    ids = 1 + rng.permutation(num_blocks - 1)
    tables = np.full((num_rows, width), NULL_BLOCK, np.int32)
    keys, values, taken = [], [], 0
    for row, (_, kv_len) in enumerate(w.rows):
        tables[row, : blocks_of[row]] = ids[taken : taken + blocks_of[row]]
        taken += blocks_of[row]
        new = rng.standard_normal((2, kv_len, w.kv_heads, w.head_dim))
        k, v = np.asarray(jnp.asarray(new, dtype).astype(jnp.float32))
        for place in range(kv_len):
            block, offset = tables[row, place // w.block_size], place % w.block_size
            k_blocks[block, :, offset] = k[place]
            v_blocks[block, :, offset] = v[place]
        keys.append(k)
        values.append(v)
    q_lens = [q_len for q_len, _ in w.rows] + [0] * w.padding_rows
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    kv_lens = np.array([kv for _, kv in w.rows] + [0] * w.padding_rows, np.int32)
    tokens = int(cu_q_lens[-1]) + w.padding_tokens
    return PagedCase(
        q=rng.standard_normal((tokens, w.q_heads, w.head_dim)).astype(np.float32),
        cache=KVCache(
            layers=(
                LayerKV(k=jnp.asarray(k_blocks, dtype), v=jnp.asarray(v_blocks, dtype)),
            )
        ),
        block_tables=tables,
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        keys=keys,
        values=values,
    )


def low_bit_paged_case(
    workload, kv_cache_dtype, *, rotation=False, seed=0, unused=np.nan
):
    """Build a case whose keys and values were written in a low-bit format.

    Scales of slots that no token was written to are `unused`, and codes random.
    """
    case = random_paged_case(workload, seed)
    rng = np.random.default_rng(seed + 1)
    num_blocks, kv_heads, block_size, head_dim = case.cache.layers[0].k.shape
    cache = init_cache(
        CacheConfig(
            num_layers=1,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            rotation=rotation,
            kv_scales=((0.02, 0.03),),
        )
    )
    cache = jax.tree.map(
        lambda x: (
            jnp.full_like(x, unused)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else jnp.asarray(rng.integers(0, 100, x.shape), x.dtype)
        ),
        cache,
    )
    k, v = np.concatenate(case.keys), np.concatenate(case.values)
    # Sizes differ from token to token, so that a neighbour's scale would show.
    sizes = 10 ** rng.uniform(-1, 1, (2, len(k), 1, 1)).astype(np.float32)
    slots = [
        table[np.arange(len(keys)) // block_size] * block_size
        + np.arange(len(keys)) % block_size
        for table, keys in zip(case.block_tables, case.keys, strict=False)
    ]
    cache = jax.jit(write_kv, static_argnums=1)(
        cache, 0, k * sizes[0], v * sizes[1], np.concatenate(slots).astype(np.int32)
    )
    keys, values = (
        [decoded(stored)[row // block_size, :, row % block_size] for row in slots]
        for stored in cache.layers[0]
    )
    return dataclasses.replace(case, cache=cache, keys=keys, values=values)


def dense_attention(case, *, scale=None, window=None, soft_cap=None):
    """Softmax attention in float64, one query at a time."""
    tokens, q_heads, head_dim = case.q.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = np.zeros(case.q.shape)
    lse = np.full((tokens, q_heads), -np.inf)
    for row, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        first, last = case.cu_q_lens[row], case.cu_q_lens[row + 1]
        for token in range(first, last):
            position = len(k) - (last - first) + (token - first)
            begin = 0 if window is None else max(0, position - window + 1)
            if position < 0:
                continue
            for head in range(q_heads):
                kv_head = head // (q_heads // k.shape[1])
                q = case.q[token, head].astype(np.float64)
                scores = k[begin : position + 1, kv_head].astype(np.float64) @ q * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                total = weights.sum()
                out[token, head] = weights @ v[begin : position + 1, kv_head] / total
                lse[token, head] = scores.max() + np.log(total)
    return out, lse


def cache_config(**changes):
    """A small CacheConfig."""
    defaults = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "num_blocks": 6,
        "block_size": 4,
        "kv_cache_dtype": "float32",
    }
    return CacheConfig(**(defaults | changes))


def dense_greedy(params, config, prompt, num_tokens):
    """Greedy tokens of a decoder that keeps no cache: recomputes all, in numpy float64.

    Written apart from `jaxkv.device.llama` on purpose.
    """
    weights = {name: np.asarray(x, np.float64) for name, x in params.items()}
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dense_logits(weights, config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def dense_logits(weights, config, tokens):
    """Logits of every position, float64; plain Llama without biases or scaling."""
    x = weights["embed_tokens.weight"][np.asarray(tokens)]
    count, half = len(tokens), config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(count)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)
        return x / scale * weights[name]

    def rotate(x):
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    mask = np.tril(np.ones((count, count), bool))
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"

        def linear(x, name, prefix=prefix):
            return x @ weights[f"{prefix}.{name}.weight"].T

        h = norm(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (
            linear(h, f"self_attn.{n}_proj").reshape(count, -1, config.head_dim)
            for n in "qkv"
        )
        q, k = rotate(q), rotate(k)
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim)
        scores = np.where(mask, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", p, v).reshape(count, -1)
        x = x + linear(out, "self_attn.o_proj")
        h = norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate, up = linear(h, "mlp.gate_proj"), linear(h, "mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    return norm(x, "norm.weight") @ weights[f"{head}.weight"].T


def run_engine(engine, requests, order=None):
    """Run {request id: (prompt, params)} to the end; return the last outputs."""
    for request_id in order or requests:
        engine.add_request(request_id, *requests[request_id])
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished, "reported twice"
                finished[output.request_id] = output
    return finished


def token_ids(outputs):
    """{request id: tokens of its only output}."""
    return {
        request_id: list(output.outputs[0].token_ids)
        for request_id, output in outputs.items()
    }
