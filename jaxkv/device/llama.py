"""The decoder: its parameters, their names and shapes, and its forward pass.

`Llama` is a flax module that research code can take apart. It knows nothing of
caches: attention is a function that the caller hands in, so the same module runs
over a paged `KVCache`, over dense arrays, or over whatever an experiment needs.

*params* are the module's flat state: a dict from dotted name to array, with Hugging
Face's names less the leading `model.`, and Hugging Face's shapes: weights stay
[out, in], which the CPU kernels read as they are. Layers are unrolled and every layer
has arrays of its own: scanning stacked weights copies them every step.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxkv.config import ModelConfig, RopeScaling
from jaxkv.device.dense import multiply, rms_norm, swiglu

Params = Mapping[str, jax.Array]

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""(layer, q, k, v) -> attention output shaped like q.

q is [tokens, q_heads, head_dim]; k and v are [tokens, kv_heads, head_dim]. A cache
stores k and v and attends to everything stored.
"""


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name every parameter of a model and give its shape.

    Returns:
        Dotted name to shape, in the order of the forward pass.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_dim = config.num_attention_heads * config.head_dim
    kv_dim = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out_dim: int, in_dim: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_dim, in_dim)
        if bias:
            shapes[f"{name}.bias"] = (out_dim,)

    shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        linear(f"{attention}.q_proj", q_dim, hidden, config.attention_bias)
        linear(f"{attention}.k_proj", kv_dim, hidden, config.attention_bias)
        linear(f"{attention}.v_proj", kv_dim, hidden, config.attention_bias)
        linear(f"{attention}.o_proj", hidden, q_dim, config.attention_output_bias)
        if config.qk_norm:
            shapes[f"{attention}.q_norm.weight"] = (config.head_dim,)
            shapes[f"{attention}.k_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{mlp}.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{mlp}.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{mlp}.down_proj", hidden, inner, config.mlp_bias)
    shapes["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Return the rotary frequency of each pair of dimensions, float32 [head_dim / 2].

    RoFormer (Su et al., 2021), section 3.4.2, with the two stretchings of
    `RopeScaling`. Computed in float32, as checkpoints were trained.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(
        config.head_dim
    )
    frequencies = (np.float32(1.0) / np.float32(config.rope_theta) ** exponents).astype(
        np.float32
    )
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return (frequencies / np.float32(scaling.factor)).astype(np.float32)
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Stretch low frequencies, keep high ones, blend between (Llama 3.1)."""
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    share_kept = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    stretched = frequencies / scaling.factor
    blended = (1 - share_kept) * stretched + share_kept * frequencies
    return blended.astype(np.float32)


def apply_rope(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half_dim"],
    sin: Float[Array, "tokens half_dim"],
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate the pairs (i, i + head_dim / 2) of every head; float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    return rotated.astype(x.dtype)


class Linear(nnx.Module):
    """A product with a weight kept as [out, in], and a bias where there is one."""

    def __init__(self, in_dim: int, out_dim: int, *, bias: bool, dtype: Any):
        self.weight = nnx.Param(jnp.zeros((out_dim, in_dim), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((out_dim,), dtype))
        self.has_bias = bias

    def __call__(
        self, x: Float[Array, "tokens in_dim"]
    ) -> Float[Array, "tokens out_dim"]:
        """Return x @ weight.T (+ bias), in x's dtype."""
        (y,) = project(x, self)
        return y


def project(
    x: Float[Array, "tokens in_dim"], *linears: Linear
) -> tuple[Float[Array, "tokens _"], ...]:
    """Return what each of several `Linear` gives for the same x, computed together."""
    products = multiply(x, *(linear.weight[...] for linear in linears))
    return tuple(
        y + linear.bias[...][None] if linear.has_bias else y
        for linear, y in zip(linears, products, strict=True)
    )


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis (Zhang & Sennrich, 2019)."""

    def __init__(self, dim: int, *, eps: float, dtype: Any):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
        """Normalise in float32, scale in x's dtype."""
        return rms_norm(x, self.weight[...], eps=self.eps)


class Attention(nnx.Module):
    """Projections, optional q/k norms and RoPE around a given attention function."""

    def __init__(self, config: ModelConfig, dtype: Any):
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = Linear(hidden, q_dim, bias=bias, dtype=dtype)
        self.k_proj = Linear(hidden, kv_dim, bias=bias, dtype=dtype)
        self.v_proj = Linear(hidden, kv_dim, bias=bias, dtype=dtype)
        self.o_proj = Linear(
            q_dim, hidden, bias=config.attention_output_bias, dtype=dtype
        )
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            eps = config.rms_norm_eps
            self.q_norm = RMSNorm(self.head_dim, eps=eps, dtype=dtype)
            self.k_norm = RMSNorm(self.head_dim, eps=eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        cos: Float[Array, "tokens half_dim"],
        sin: Float[Array, "tokens half_dim"],
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> Float[Array, "tokens hidden"]:
        """Return this layer's attention output, before the residual is added."""
        tokens = x.shape[0]
        q, k, v = (
            y.reshape(tokens, -1, self.head_dim)
            for y in project(x, self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
        return self.o_proj(out.reshape(tokens, self.heads * self.head_dim))


class MLP(nnx.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, dtype: Any):
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)

    def __call__(
        self, x: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens hidden"]:
        """Return down(silu(gate(x)) * up(x))."""
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(swiglu(gate, up))


class DecoderLayer(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, dtype: Any):
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=eps, dtype=dtype
        )
        self.mlp = MLP(config, dtype)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        cos: Float[Array, "tokens half_dim"],
        sin: Float[Array, "tokens half_dim"],
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> Float[Array, "tokens hidden"]:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nnx.Module):
    """The token table, used for look-up and, where tied, as the output projection."""

    def __init__(self, vocab_size: int, dim: int, dtype: Any):
        self.weight = nnx.Param(jnp.zeros((vocab_size, dim), dtype))


class Llama(nnx.Module):
    """A Llama-architecture decoder: Llama 2 to 3.2, Qwen2, Qwen3.

    Fresh modules hold zeros; `merge(config, params)` gives one with parameters, and
    `split(module)` gives the parameters back.
    """

    def __init__(self, config: ModelConfig):
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, dtype) for _ in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=dtype
            )

    def __call__(
        self,
        token_ids: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        attend: Attend,
    ) -> Float[Array, "tokens hidden"]:
        """Run the layers over a flat list of tokens of any number of requests.

        Args:
            token_ids: Ids inside the vocabulary; padding may be any such id.
            positions: Each token's position in its own request.
            attend: See `Attend`; called once a layer, in order.

        Returns:
            The hidden states after the last norm, ready for `logits`.
        """
        x, cos, sin = self.embed(token_ids, positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, functools.partial(attend, index))
        return self.norm(x)

    def embed(
        self, token_ids: Int32[Array, " tokens"], positions: Int32[Array, " tokens"]
    ) -> tuple[
        Float[Array, "tokens hidden"],
        Float[Array, "tokens half_dim"],
        Float[Array, "tokens half_dim"],
    ]:
        """Return what the layers take: x, and the cos and sin of the rotations."""
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(
            rope_frequencies(self.config)
        ).reshape(1, -1)
        # Without a barrier XLA fuses the trigonometry into every layer's rotation and
        # does it anew there, for each head.
        cos, sin = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
        return self.embed_tokens.weight[...][token_ids], cos, sin

    def logits(
        self, hidden: Float[Array, "samples hidden"]
    ) -> Float[Array, "samples vocab"]:
        """Project hidden states to float32 logits over the vocabulary."""
        tied = self.config.tie_word_embeddings
        weight = self.embed_tokens.weight if tied else self.lm_head.weight
        (logits,) = multiply(hidden, weight[...], result_dtype="float32")
        return logits


@functools.lru_cache(maxsize=16)
def _graphdef(config: ModelConfig) -> Any:
    """The module's structure without its arrays."""
    return nnx.split(nnx.eval_shape(lambda: Llama(config)))[0]


def merge(config: ModelConfig, params: Params) -> Llama:
    """Build the module that holds `params`; cheap, and free under tracing.

    Raises:
        ValueError: Names or shapes differ from `param_shapes(config)`.
    """
    check_params(config, params)
    state = nnx.from_flat_state(
        {_path(name): nnx.Param(value) for name, value in params.items()}
    )
    return nnx.merge(_graphdef(config), state)


def split(module: Llama) -> dict[str, jax.Array]:
    """Return the module's parameters as a flat dict; the arrays are shared."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    by_name = {".".join(map(str, path)): leaf[...] for path, leaf in state}
    return {name: by_name[name] for name in param_shapes(module.config)}


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


def check_params(config: ModelConfig, params: Params) -> None:
    """Check that `params` are those of `config`.

    Raises:
        ValueError: Lists every missing, unknown and misshapen parameter.
    """
    expected = param_shapes(config)
    problems = [f"missing {name}" for name in expected if name not in params]
    problems += [f"unknown {name}" for name in params if name not in expected]
    problems += [
        f"{name} has shape {tuple(params[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    if problems:
        raise ValueError(
            f"parameters do not fit the model config: {'; '.join(problems)}"
        )


def init_params(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Draw random parameters: normal weights of std 1/sqrt(fan_in), norms near one.

    The same config and seed give the same parameters on every machine.
    """
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in param_shapes(config).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            value = 1.0 + 0.1 * noise
        elif name.endswith(".bias"):
            value = 0.1 * noise
        else:
            value = noise / math.sqrt(shape[-1])
        params[name] = jnp.asarray(value, dtype=config.dtype)
    return params
