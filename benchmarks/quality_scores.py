"""How far a cache's next-token distributions are from the full-precision cache's.

Per position on the device, a tile of positions at a time; over positions in float64 on
the host.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

_SERIES_BELOW = 0.1


class Scores(NamedTuple):
    """One position, or arrays of many.

    Attributes:
        nll: Negative log-probability of the token that follows.
        kl: KL divergence, in nats, of the distribution from the reference's.
        same_top: Whether both have the same likeliest token.
    """

    nll: Float[Array, " *positions"]
    kl: Float[Array, " *positions"]
    same_top: Bool[Array, " *positions"]


def kl_divergence(
    reference: Float[Array, " vocab"], other: Float[Array, " vocab"]
) -> Float[Array, ""]:
    """Return KL(reference || other), in nats, from float32 log-probabilities.

    Summed is q - p - p log(q / p), which is the same, since both p and q sum to one,
    and of which no term is negative: rounding cannot make the sum so, and equal
    distributions give exactly 0. (J. Schulman, "Approximating KL divergence", 2020.)
    """
    p, q, d = jnp.exp(reference), jnp.exp(other), other - reference
    # p (exp(d) - 1 - d) by its first terms: the difference would be all rounding.
    series = p * d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
    terms = jnp.where(jnp.abs(d) < _SERIES_BELOW, series, q - p - p * d)
    return jnp.sum(terms)


def score(
    reference: Float[Array, " vocab"],
    logits: Float[Array, " vocab"],
    target: Int32[Array, ""],
) -> Scores:
    """Compare one position.

    Args:
        reference: Log-probabilities of the full-precision cache.
        logits: Of the cache that is measured.
        target: The token that follows.
    """
    logprobs = jax.nn.log_softmax(logits)
    return Scores(
        nll=-logprobs[target],
        kl=kl_divergence(reference, logprobs),
        same_top=jnp.argmax(reference) == jnp.argmax(logprobs),
    )


def summarize(scores: Scores, reference_nll: np.ndarray) -> dict[str, Any]:
    """Return the figures over all positions.

    Args:
        scores: numpy arrays of all positions.
        reference_nll: The full-precision cache's.

    Returns:
        {perplexity, perplexity_change_percent, perplexity_change_error, mean_kl,
        kl_p999, same_top_percent}. The error is the standard error of the change, from
        the differences at each position.
    """
    nll, reference = (np.asarray(x, np.float64) for x in (scores.nll, reference_nll))
    kl = np.asarray(scores.kl, np.float64)
    difference = nll - reference
    ratio = np.exp(difference.mean())
    error = ratio * difference.std(ddof=1) / np.sqrt(len(difference))
    return {
        "perplexity": float(np.exp(nll.mean())),
        "perplexity_change_percent": float(100 * (ratio - 1)),
        "perplexity_change_error": float(100 * error),
        "mean_kl": float(kl.mean()),
        "kl_p999": float(np.quantile(kl, 0.999)),
        "same_top_percent": float(100 * np.mean(np.asarray(scores.same_top))),
    }


def num_agreeing(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Return how many tokens are equal before the first that differs."""
    pairs = zip(tokens, expected, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
