"""Reads `<architecture>.*` metadata so that no key is overlooked.

llama.cpp reads what it knows and ignores the rest. Here every key of the model's
own namespace is asked for, known not to matter, or an error: a key nobody asked for
may be a window, a soft cap or a scale, and then the model would be another one.
"""

import math
from collections.abc import Sequence
from typing import Any

from convert.gguf_header import Header

_NEUTRAL: dict[str, Sequence[Any]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (0, 1),
}
"""Values under which a key changes nothing; with any other one it is an error."""

_HARMLESS = ("rope.scaling.original_context_length", "rope.scaling.finetuned")
"""Read only by scalings that are refused themselves, and by nothing else."""


class Metadata:
    """One architecture's keys, each taken once; `check_all_used` names the rest."""

    def __init__(self, header: Header):
        self.path = header.path
        self._values = header.metadata
        self._architecture = str(header.metadata.get("general.architecture"))
        self._taken: set[str] = set()

    def architecture(self, known: Sequence[str]) -> str:
        """Return the architecture.

        Raises:
            ValueError: It is not a known one, or the file holds no model.
        """
        if self._architecture not in known:
            raise ValueError(
                f"{self.path}: architecture {self._architecture!r} is unknown; known "
                f"are {', '.join(known)}"
            )
        kind = self._values.get("general.type", "model")
        if kind != "model":
            raise ValueError(f"{self.path} holds no model but is of type {kind!r}")
        return self._architecture

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer, or a list's one value where it is given per layer."""
        value = self._take(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise ValueError(
                f"{self.path}: {self._name(key)} differs between layers: {value}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{self.path}: {self._name(key)} must be a positive integer, got "
                f"{value!r}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number as a float."""
        value = self._take(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
        ):
            raise ValueError(
                f"{self.path}: {self._name(key)} must be a number, got {value!r}"
            )
        return float(value)

    def expect(self, key: str, expected: int) -> None:
        """Check a key that may be absent and otherwise has one right value."""
        value = self._take(key, expected)
        if value != expected:
            raise ValueError(
                f"{self.path}: {self._name(key)} is {value!r}; only the head_dim, "
                f"{expected}, is supported"
            )

    def linear_rope_factor(self) -> float:
        """Return the factor of linear rope scaling; 1: no scaling.

        Raises:
            ValueError: The scaling is of another type (yarn, longrope).
        """
        factor = self.number("rope.scaling.factor", 1.0)
        kind = self._take("rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise ValueError(
                f"{self.path}: {self._name('rope.scaling.type')} {kind!r} is not "
                "supported; supported are none and linear"
            )
        return factor if kind == "linear" and factor != 0 else 1.0

    def check_all_used(self) -> None:
        """Check that nothing in the model's namespace is left over.

        Raises:
            ValueError: Names every key that is left, with its value.
        """
        left = []
        prefix = f"{self._architecture}."
        for name, value in self._values.items():
            key = name.removeprefix(prefix)
            if not name.startswith(prefix) or key in self._taken or key in _HARMLESS:
                continue
            if value not in _NEUTRAL.get(key, ()):
                left.append(f"{name} = {value!r}")
        if left:
            raise ValueError(
                f"{self.path}: metadata that this converter cannot honour: "
                + "; ".join(left)
            )

    def _name(self, key: str) -> str:
        return f"{self._architecture}.{key}"

    def _take(self, key: str, default: Any) -> Any:
        self._taken.add(key)
        value = self._values.get(self._name(key), default)
        if value is None:
            raise ValueError(f"{self.path}: {self._name(key)} is missing")
        return value
