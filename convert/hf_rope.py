"""The rotary settings of a Hugging Face `config.json`, in both of their spellings.

transformers 4 writes `rope_theta` and `rope_scaling` (whose `rope_type` was once
called `type`), transformers 5 one `rope_parameters`. Both are read; where both are
there they must agree.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from jaxkv.config import RopeScaling

DEFAULT_THETA = 10000.0
ORIGINAL = "original_max_position_embeddings"

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        ORIGINAL,
    ),
}


def read_rope(
    data: Mapping[str, Any],
) -> tuple[float, RopeScaling | None, list[str]]:
    """Read theta and scaling out of either spelling.

    Returns:
        rope_theta, the scaling (None: plain RoPE), and what is wrong, if anything.
    """
    merged, problems = _merge(data)
    rope_type = merged.pop("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        problems.append(
            f"rope_type {rope_type!r} is not supported (only {sorted(ROPE_KEYS)})"
        )
        return DEFAULT_THETA, None, problems
    theta = merged.pop("rope_theta", DEFAULT_THETA)
    if merged.get("partial_rotary_factor") in (None, 1):
        merged.pop("partial_rotary_factor", None)
    if rope_type == "llama3":
        merged.setdefault(ORIGINAL, data.get("max_position_embeddings"))
    wanted = ROPE_KEYS[rope_type]
    problems += [
        f"rope_type {rope_type!r} needs {key}" for key in wanted if key not in merged
    ]
    problems += [
        f"rope_type {rope_type!r} with unknown key {key!r} (value {value!r})"
        for key, value in merged.items()
        if key not in wanted
    ]
    problems += [
        f"{key} has the value {value!r}"
        for key, value in {"rope_theta": theta, **merged}.items()
        if not _is_number(key, value)
    ]
    if problems or rope_type == "default":
        return DEFAULT_THETA if problems else float(theta), None, problems
    numbers: dict[str, Any] = {
        key: value if key == ORIGINAL else float(value) for key, value in merged.items()
    }
    kind: Any = rope_type  # one of ROPE_KEYS
    try:
        return float(theta), RopeScaling(rope_type=kind, **numbers), problems
    except ValueError as error:
        return float(theta), None, [str(error)]


def write_rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the `rope_scaling` that `read_rope` reads back."""
    if scaling is None:
        return None
    settings = dataclasses.asdict(scaling)
    return {"rope_type": scaling.rope_type} | {
        key: settings[key] for key in ROPE_KEYS[scaling.rope_type]
    }


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Say whether a JSON value is a number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of 309 digits and more
        return False


def _merge(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return all rotary settings in one dict, with `type` renamed to `rope_type`."""
    merged: dict[str, Any] = {}
    problems: list[str] = []
    places: list[tuple[str, Any]] = []
    for place in ("rope_parameters", "rope_scaling"):
        settings = data.get(place)
        if settings is not None and not isinstance(settings, Mapping):
            problems.append(f"{place} has the value {settings!r}")
        elif settings is not None:
            places += [
                ("rope_type" if key == "type" else key, value)
                for key, value in settings.items()
            ]
    if data.get("rope_theta") is not None:
        places.append(("rope_theta", data["rope_theta"]))
    for key, value in places:
        if key in merged and merged[key] != value:
            problems.append(f"two values for {key}: {merged[key]!r} and {value!r}")
        merged[key] = value
    return merged, problems


def _is_number(key: str, value: Any) -> bool:
    return is_finite_number(value) and (key != ORIGINAL or isinstance(value, int))
