"""A paged KV cache in a model that is not ours: no engine, arrays and functions."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv

LAYERS, HEADS, HEAD_DIM, WIDTH, VOCAB, MAX_LEN = 2, 4, 16, 64, 256, 64
CACHE = jaxkv.CacheConfig(
    num_layers=2, num_kv_heads=4, head_dim=16, num_blocks=10, kv_cache_dtype="float32"
)


def gpt(params, tokens, positions, attend):
    """Return each token's likeliest successor; only `attend` knows about a cache."""
    x = params["token"][tokens] + params["position"][positions]
    for i in range(LAYERS):
        qkv = (jax.nn.standardize(x) @ params["qkv"][i]).reshape(-1, 3, HEADS, HEAD_DIM)
        x = x + attend(i, *qkv.swapaxes(0, 1)).reshape(-1, WIDTH)
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ params["mlp"][i])
    return (x @ params["token"].T).argmax(-1)


def generate_dense(params, text, num_new):
    """Compute the whole text again for every new token."""

    def attend(layer, q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    step = jax.jit(gpt, static_argnames="attend")
    for end in range(len(text), len(text) + num_new):
        out = step(params, np.pad(text, (0, MAX_LEN - end)), np.arange(MAX_LEN), attend)
        text = [*text, int(out[end - 1])]
    return text


@jax.jit(donate_argnames="cache")  # so that blocks are written in place
def paged_step(params, cache, tokens, positions, slot_mapping, **rows):
    """Store the new tokens' keys and values, then attend to everything stored."""

    def attend(layer, q, k, v):
        nonlocal cache
        cache = jaxkv.write_kv(cache, layer, k, v, slot_mapping)
        return jaxkv.paged_attention(q, cache, layer, **rows)

    return gpt(params, tokens, positions, attend)[rows["cu_q_lens"][1:] - 1], cache


def generate_paged(params, texts, num_new, pool):
    """Compute every token once: the prompts together, then one new token a row."""
    cache, size, null = jaxkv.init_cache(CACHE), pool.block_size, [jaxkv.NULL_BLOCK] * 4
    kv_lens, tables = [0] * len(texts), [[] for _ in texts]
    for _ in range(num_new):
        new, cu_q_lens = [], [0]
        for text, table, start in zip(texts, tables, kv_lens, strict=True):
            while len(table) * size < len(text):
                table += pool.allocate(1)
            slots = [block * size + offset for block in table for offset in range(size)]
            new += [(text[i], i, slots[i]) for i in range(start, len(text))]
            cu_q_lens.append(len(new))
        kv_lens = [len(text) for text in texts]
        rows = {"kv_lens": jnp.int32(kv_lens), "cu_q_lens": jnp.int32(cu_q_lens)}
        rows["block_tables"] = jnp.int32([(table + null)[:4] for table in tables])
        out, cache = paged_step(params, cache, *jnp.int32(new).T, **rows)
        texts = [[*text, int(token)] for text, token in zip(texts, out, strict=True)]
    pool.release([block for table in tables for block in table])
    return texts


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    shapes = {"token": (VOCAB, WIDTH), "position": (MAX_LEN, WIDTH)}
    shapes |= {"qkv": (LAYERS, WIDTH, 3 * WIDTH), "mlp": (LAYERS, WIDTH, WIDTH)}
    params = {n: jnp.float32(rng.normal(0, 0.2, s)) for n, s in shapes.items()}
    prompts = [rng.integers(VOCAB, size=n).tolist() for n in (3, 16, 40)]
    pool = jaxkv.BlockPool(CACHE.num_blocks, CACHE.block_size)
    dense = [generate_dense(params, prompt, 20) for prompt in prompts]
    paged = generate_paged(params, prompts, 20, pool)
    print(*dense, *paged, "equal" if paged == dense else "different", sep="\n")
