"""Hugging Face's `config.json` to `ModelConfig` and back, failing closed.

Every key of a `config.json` is used, known to leave the arithmetic alone, allowed
with one value only, or an error: a key we have never heard of may change the maths.
An absent key means Hugging Face's own default for the family. Both spellings of
rotary settings are read: `rope_theta` with `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5). Export writes the former, which both read.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from convert.hf_quantization import check_quantization_config
from convert.hf_rope import is_finite_number, read_rope, write_rope
from convert.source import join
from jaxkv.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to one `model_type`.

    Attributes:
        architecture: Its causal language model class in Hugging Face.
        defaults: Value of each key it has beside the common ones, when absent.
        attention_bias: Fixed biases of q, k, v: the family has no key for them.
        attention_output_bias: The `attention_bias` key covers the output projection.
        qk_norm: The family normalises q and k.
        ignored: Keys of this family that change nothing.
    """

    architecture: str
    defaults: Mapping[str, Any]
    attention_bias: bool = False
    attention_output_bias: bool = True
    qk_norm: bool = False
    ignored: frozenset[str] = frozenset()


COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
# Without `use_sliding_window`, which must be false, these two are not looked at.
QWEN_IGNORED = frozenset({"sliding_window", "max_window_layers"})

FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults=COMMON_DEFAULTS
        | {
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=QWEN_DEFAULTS,
        attention_bias=True,
        attention_output_bias=False,
        ignored=QWEN_IGNORED,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False},
        qk_norm=True,
        ignored=QWEN_IGNORED,
    ),
}

READ_APART = frozenset(
    (
        "model_type",
        "architectures",
        "dtype",
        "torch_dtype",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
    )
)

ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_sliding_window": (False, None),
    "use_mrope": (False, None),
    "sliding_window": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
    "auto_map": (None,),
    "per_layer_config": (None,),
    "tie_last_hidden_states": (None,),
}
"""Keys that would change the arithmetic, with the values that do not."""

IGNORED = frozenset(
    (
        # who wrote it and how it was trained
        "transformers_version",
        "transformers.js_config",
        "_name_or_path",
        "name_or_path",
        "is_llama_config",
        "unsloth_version",
        "unsloth_fixed",
        "initializer_range",
        "attention_dropout",
        "use_cache",
        "pad_token_id",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "_attn_implementation",
        "attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        # fine-tuning tasks and tokenizers
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "tokenizer_class",
        "prefix",
        "sep_token_id",
        "decoder_start_token_id",
        "is_decoder",
        # generation settings that older versions kept here
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    )
)
"""Keys that never change what the model computes."""

INTEGERS = frozenset(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "bos_token_id",
    )
)
BOOLEANS = frozenset(("tie_word_embeddings", "attention_bias", "mlp_bias"))
NULLABLE = frozenset(
    ("num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id")
)


def read_model_config(
    data: Mapping[str, Any],
    *,
    where: str = "config.json",
    more_eos_ids: Iterable[int] = (),
) -> ModelConfig:
    """Build a `ModelConfig` from what a Hugging Face `config.json` holds.

    Args:
        data: The parsed file.
        where: The file, for messages.
        more_eos_ids: End-of-sequence ids that the folder's other files name. The
            config's own come first; its family's default counts only where nobody
            names one.

    Returns:
        The config; its dtype is what `stated_dtype` gives, float32 where that is None.
        It has no `kv_scales`: they are tensors.

    Raises:
        ValueError: Names every key that is unknown, missing, of a wrong type, or has
            a value whose arithmetic is not ours.
    """
    family = _find_family(data, where)
    problems = _check_keys(data, family)
    values: dict[str, Any] = {}
    for key, default in family.defaults.items():
        values[key] = data.get(key, default)
        problems += _check_type(key, values[key])
    rope_theta, rope_scaling, rope_problems = read_rope(data)
    problems += rope_problems
    problems += check_quantization_config(data.get("quantization_config"))
    if problems:
        raise ValueError(f"{where}: {join(problems)}")

    heads = values["num_attention_heads"]
    if values["head_dim"] is None and values["hidden_size"] % heads:
        raise ValueError(
            f"{where}: hidden_size {values['hidden_size']} is not a multiple of "
            f"num_attention_heads {heads}, and there is no head_dim"
        )
    attention_bias = values.get("attention_bias", family.attention_bias)
    eos_ids = [*_as_ids(data.get("eos_token_id")), *more_eos_ids]
    if not eos_ids and "eos_token_id" not in data:
        eos_ids = _as_ids(values["eos_token_id"])
    try:
        return ModelConfig(
            model_type=data["model_type"],
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_hidden_layers=values["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=values["num_key_value_heads"] or heads,
            head_dim=values["head_dim"] or values["hidden_size"] // heads,
            max_position_embeddings=values["max_position_embeddings"],
            rms_norm_eps=float(values["rms_norm_eps"]),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=values["tie_word_embeddings"],
            attention_bias=attention_bias,
            attention_output_bias=attention_bias and family.attention_output_bias,
            mlp_bias=values.get("mlp_bias", False),
            qk_norm=family.qk_norm,
            bos_token_id=values["bos_token_id"],
            eos_token_ids=tuple(dict.fromkeys(eos_ids)),
            dtype=stated_dtype(data) or "float32",
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def stated_dtype(data: Mapping[str, Any]) -> str | None:
    """Return the dtype a `config.json` states, or None if it is not one of ours."""
    name = data.get("dtype") or data.get("torch_dtype")
    name = name.removeprefix("torch.") if isinstance(name, str) else None
    return name if name in ("float32", "bfloat16", "float16") else None


def write_model_config(config: ModelConfig) -> dict[str, Any]:
    """Return a Hugging Face `config.json` that `read_model_config` reads back.

    All but `kv_scales`, which are tensors.

    Raises:
        ValueError: No family of Hugging Face's has this arithmetic under the
            config's `model_type`.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"cannot export model_type {config.model_type!r}; known are "
            f"{sorted(FAMILIES)}"
        )
    values = dataclasses.asdict(config)
    data: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "hidden_act": "silu",
        "torch_dtype": config.dtype,
        "use_cache": True,
        "rope_theta": config.rope_theta,
        "rope_scaling": write_rope(config.rope_scaling),
        "head_dim": config.head_dim,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    data |= {key: values[key] for key in family.defaults if key in values}
    read = read_model_config(data, where="the exported config.json")
    read = dataclasses.replace(read, kv_scales=config.kv_scales)
    lost = [
        f"{field.name} {getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(read, field.name)
    ]
    if lost:
        raise ValueError(
            f"Hugging Face's {config.model_type} cannot express {join(lost)}"
        )
    return data


def _find_family(data: Mapping[str, Any], where: str) -> Family:
    model_type = data.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ValueError(
            f"{where}: model_type {model_type!r} is not supported; known are "
            f"{sorted(FAMILIES)}"
        )
    architectures = data.get("architectures")
    if architectures not in (None, [family.architecture]):
        raise ValueError(
            f"{where}: architectures {architectures!r} is not supported; a "
            f"{model_type} must be ['{family.architecture}']"
        )
    return family


def _check_keys(data: Mapping[str, Any], family: Family) -> list[str]:
    """Say which keys are unknown and which have a value that changes the maths."""
    problems = []
    for key, value in data.items():
        if key in family.defaults or key in READ_APART or key in family.ignored:
            continue
        if key == "layer_types":
            kinds = value if isinstance(value, list) else [value]
            if any(kind not in ("full_attention", None) for kind in kinds):
                problems.append(
                    f"layer_types {value!r} is not supported (only 'full_attention')"
                )
        elif key in ALLOWED_VALUES:
            allowed = ALLOWED_VALUES[key]
            if value not in allowed:
                problems.append(
                    f"{key} {value!r} is not supported (only {allowed[0]!r})"
                )
        elif key not in IGNORED:
            problems.append(f"unknown key {key!r} (value {value!r})")
    return problems


def _check_type(key: str, value: Any) -> list[str]:
    if value is None and key in NULLABLE:
        return []
    if key in INTEGERS:
        good = _is_int(value) and value >= (0 if key == "bos_token_id" else 1)
    elif key in BOOLEANS:
        good = isinstance(value, bool)
    elif key == "eos_token_id":
        good = _is_int(value) or (
            isinstance(value, list) and all(_is_int(item) for item in value)
        )
    else:  # rms_norm_eps
        good = is_finite_number(value) and value >= 0
    return [] if good else [f"{key} has the value {value!r}"]


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
