"""What a Hugging Face folder says of quantisation: calibrated KV scales, or an error.

Parameters are never quantised here. What is read are the static scales that a
calibration of a float8 KV cache leaves: one number for K and one for V of a layer, a
stored value being its float8 code times the scale. They have two common names, and
two programs describe them in `config.json`:

- llm-compressor (compressed-tensors): `self_attn.k_scale` and `self_attn.v_scale`; a
  `kv_cache_scheme` as compressed_tensors/quantization/quant_args.py defines it;
- NVIDIA ModelOpt, earlier AMMO: `self_attn.k_proj.k_scale` and
  `self_attn.v_proj.v_scale`; a `kv_cache_quant_algo` in `hf_quant_config.json`, which
  modelopt/torch/export/convert_hf_config.py rewrites as a `kv_cache_scheme` for
  `config.json`.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.source import TensorRef, join
from jaxkv.kv_format import LARGEST_SCALE, SMALLEST_SCALE

SCALE_DTYPES = ("float32", "bfloat16", "float16")
# The scale of K and that of V, within a layer.
SPELLINGS = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """The keys that an object may have; any other is an error.

    Attributes:
        needed: Keys that must be there, with the values they may have.
        allowed: Keys that may be there, likewise.
        ignored: Keys that say nothing about the numbers.
    """

    needed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


# Without a `type` compressed-tensors means integers; its other defaults are ours.
SCHEME = Form(
    needed={"num_bits": (8,), "type": ("float",)},
    allowed={
        "symmetric": (True,),
        "strategy": ("tensor", None),
        "dynamic": (False,),
        "group_size": (None,),
        "block_structure": (None,),
        "actorder": (None,),
    },
    ignored=frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype")),
)
METHODS = {
    "compressed-tensors": Form(
        allowed={
            "config_groups": ({}, None),
            "sparsity_config": ({}, None),
            "transform_config": ({}, None),
        },
        ignored=frozenset(
            (
                "format",
                "ignore",
                "quantization_status",
                "global_compression_ratio",
                "version",
            )
        ),
    ),
    "modelopt": Form(
        allowed={
            "quant_algo": (None,),
            "kv_cache_quant_algo": ("FP8", None),
            "config_groups": ({}, None),
            "quantized_layers": ({}, None),
            "group_size": (None,),
        },
        ignored=frozenset(("ignore", "exclude_modules", "producer")),
    ),
}


def check_quantization_config(value: Any) -> list[str]:
    """Say what a `quantization_config` asks for beside static float8 KV scales.

    Args:
        value: As `config.json` has it; None where it has none.

    Returns:
        One problem for each key that is unknown, missing, or has a value that is not
        supported. Whether the scales are there, the tensors tell.
    """
    where = "quantization_config"
    if value is None:
        return []
    if not isinstance(value, dict):
        return [f"{where} {reprlib.repr(value)} is not supported (only None)"]
    method = value.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        known = " and ".join(repr(name) for name in METHODS)
        return [f"{where}: quant_method {method!r} is not supported (only {known})"]
    rest = dict(value)
    del rest["quant_method"]
    scheme = rest.pop("kv_cache_scheme", None)
    problems = _check_form(where, rest, METHODS[method])
    if isinstance(scheme, dict):
        problems += _check_form(f"{where}: kv_cache_scheme", scheme, SCHEME)
    elif method == "modelopt" and scheme is None:
        if rest.get("kv_cache_quant_algo") is None:
            problems.append(f"{where}: kv_cache_quant_algo is missing")
    elif (method, scheme) != ("modelopt", "FP8"):
        problems.append(
            f"{where}: kv_cache_scheme {reprlib.repr(scheme)} is not supported"
        )
    return problems


def check_hf_quant_config(data: Mapping[str, Any]) -> list[str]:
    """Say the same of `hf_quant_config.json`, which ModelOpt writes.

    It writes one for a model without any quantisation too, and older versions leave
    `config.json` as it was.
    """
    quantization = data.get("quantization", data)
    if not isinstance(quantization, dict):
        return [f"quantization has the value {reprlib.repr(quantization)}"]
    algorithms = ("quant_algo", "kv_cache_quant_algo", "kv_cache_scheme")
    if all(quantization.get(key) is None for key in algorithms):
        return []
    return check_quantization_config({"quant_method": "modelopt"} | quantization)


def _check_form(where: str, value: Mapping[str, Any], form: Form) -> list[str]:
    problems = [f"{where}: {key} is missing" for key in form.needed if key not in value]
    values = {**form.needed, **form.allowed}
    for key, found in value.items():
        if key in values:
            if found not in values[key]:
                problems.append(
                    f"{where}: {key} {reprlib.repr(found)} is not supported (only "
                    f"{values[key][0]!r})"
                )
        elif key not in form.ignored:
            problems.append(
                f"{where}: unknown key {key!r} (value {reprlib.repr(found)})"
            )
    return problems


def take_kv_scales(
    where: str, stored: dict[str, TensorRef], num_layers: int
) -> tuple[tuple[float, float] | None, ...]:
    """Remove the KV scales from a folder's tensors and read them.

    Args:
        where: The folder, for messages.
        stored: By their names in the folder. Scales of other kinds, and of layers
            that the model does not have, stay there.
        num_layers: Layers of the model.

    Returns:
        What `ModelConfig.kv_scales` holds, each number exactly as stored; () where no
        layer has scales.

    Raises:
        ValueError: Names every scale that stands alone, has both names in one layer,
            or is not one finite number > 0 of a float dtype.
    """
    scales: list[tuple[float, float] | None] = []
    problems: list[str] = []
    for layer in range(num_layers):
        spellings = [
            [f"model.layers.{layer}.{name}" for name in names] for names in SPELLINGS
        ]
        found = [names for names in spellings if any(name in stored for name in names)]
        if not found:
            scales.append(None)
            continue
        present = [name for names in found for name in names if name in stored]
        refs = [stored.pop(name) for name in present]
        faults = [fault for ref in refs for fault in _check_scale(ref)]
        if len(found) > 1:
            faults.append(f"{' and '.join(present)} are two names for one thing")
        elif len(refs) == 1:
            (missing,) = set(found[0]) - set(present)
            faults.append(f"{present[0]} is there, but {missing} is missing")
        problems += faults
        if not faults:
            k_scale, v_scale = (_value(ref) for ref in refs)
            scales.append((k_scale, v_scale))
    if problems:
        raise ValueError(f"{where}: {join(problems)}")
    return tuple(scales) if any(scales) else ()


def _check_scale(ref: TensorRef) -> list[str]:
    if ref.dtype.name not in SCALE_DTYPES:
        return [f"{ref.name} has dtype {ref.dtype.name}; only {SCALE_DTYPES} are read"]
    if ref.shape not in ((), (1,)):
        return [f"{ref.name} has shape {list(ref.shape)}; only one for a layer is read"]
    value = _value(ref)
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        limits = f"{SMALLEST_SCALE} to {LARGEST_SCALE}"
        return [f"{ref.name} is {value!r}, not a number from {limits}"]
    return []


def _value(ref: TensorRef) -> float:
    """Read a scale; every float32 is a Python float exactly."""
    return float(ref.load().astype(np.float32).reshape(()))
