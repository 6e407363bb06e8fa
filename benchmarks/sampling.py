"""What choosing a token for each row takes, by what the rows ask for.

    python -m benchmarks.sampling

One JSON line for each kind of request, all rows alike: median, least and most
milliseconds of the compiled `sampling.sample`. The kinds take turns.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.device.sampling import MAX_STOP_IDS, SamplingInputs, sample

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k_and_top_p": {"top_k": 50, "top_p": 0.95},
    "logprobs": {"temperature": 0.0, "wants_logprobs": True},
}


def main() -> None:
    """Measure and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    rows, vocab = arguments.rows, arguments.vocab_size
    rng = np.random.default_rng(0)
    logits = jnp.asarray(4 * rng.standard_normal((rows, vocab)), jnp.float32)
    history = jnp.zeros((1, 64), jnp.int32)
    kinds = {name: make_inputs(rows, vocab, **kind) for name, kind in KINDS.items()}
    choose = jax.jit(sample)
    for name, most in (("greedy", 1), ("top_k", 50)):
        tokens, _ = choose(logits, kinds[name], history)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        place = jnp.sum(logits >= chosen, axis=1)
        assert int(place.max()) <= most, f"{name}: a token beyond the first {most}"
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(arguments.repeats):
        for name, inputs in kinds.items():
            start = time.perf_counter()
            jax.block_until_ready(choose(logits, inputs, history))
            found[name].append(1000 * (time.perf_counter() - start))
    for name, milliseconds in found.items():
        line = {
            "benchmark": "sampling",
            "backend": jax.default_backend(),
            "rows": rows,
            "vocab_size": vocab,
            "kind": name,
            "median_ms": round(statistics.median(milliseconds), 2),
            "min_ms": round(min(milliseconds), 2),
            "max_ms": round(max(milliseconds), 2),
        }
        print(json.dumps(line), flush=True)


def make_inputs(
    rows: int,
    vocab: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    wants_logprobs: bool = False,
) -> SamplingInputs:
    """Return what rows ask for that are all alike but for their keys."""

    def numbers(value: float) -> jax.Array:
        return jnp.full((rows,), value, jnp.float32)

    lines = jnp.arange(rows, dtype=jnp.int32)
    return SamplingInputs(
        temperature=numbers(temperature),
        top_k=jnp.full((rows,), top_k, jnp.int32),
        top_p=numbers(top_p),
        min_p=numbers(min_p),
        repetition_penalty=numbers(1.0),
        presence_penalty=numbers(0.0),
        frequency_penalty=numbers(0.0),
        keys=jnp.stack([lines, lines], axis=-1).astype(jnp.uint32),
        positions=lines,
        histories=jnp.zeros_like(lines),
        prompt_lens=jnp.zeros_like(lines),
        suppressed_ids=jnp.full((rows, MAX_STOP_IDS), vocab, jnp.int32),
        wants_logprobs=jnp.asarray(wants_logprobs),
    )


if __name__ == "__main__":
    main()
