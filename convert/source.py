"""What a conversion reads: one interface over safetensors folders and GGUF files.

A `Source` knows everything about a model except its numbers: opening one reads
headers only, and checks them. Each `TensorRef.load` then reads exactly one tensor,
so a conversion never holds more than the tensor it is writing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxkv.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class TensorRef:
    """One tensor that can be loaded, with its shape and dtype known beforehand.

    Attributes:
        name: Its name in the source, for error messages.
        shape: What `load` will return; [out, in] for a projection, as in Hugging
            Face.
        dtype: Numpy dtype (`ml_dtypes.bfloat16` included) that `load` will return.
        load: Reads this tensor and nothing else; the caller owns the result.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray]

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened checkpoint of another format.

    Attributes:
        where: Its path, for error messages.
        config: The model, with `dtype` as a conversion with dtype `auto` stores it.
        tensors: By parameter name (`jaxkv.device.llama.param_shapes` has the names):
            all the model needs and nothing else, in the layout the model wants.
        tokenizer_json: Text of a `tokenizer.json`; None: the source has no tokenizer.
        tokenizer_config: At least `chat_template`, `bos_token` and `eos_token`, where
            the source has them.
        generation_config: As `generation_config.json` has it, with `bos_token_id` and
            `eos_token_id` where the source has them.
    """

    where: str
    config: ModelConfig
    tensors: Mapping[str, TensorRef]
    tokenizer_json: str | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)


def check_tensors(
    where: str,
    tensors: Mapping[str, TensorRef],
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    """Check that exactly the expected tensors are there, in their shapes.

    Args:
        where: What the source is, for the message.
        tensors: By parameter name.
        expected: What `param_shapes` returned.

    Raises:
        ValueError: Names every missing, unknown and misshapen tensor.
    """
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [
        f"{ref.name} is not a tensor of this model"
        for name, ref in tensors.items()
        if name not in expected
    ]
    problems += [
        f"{ref.name} has shape {list(ref.shape)}, the config asks for "
        f"{list(expected[name])}"
        for name, ref in tensors.items()
        if name in expected and ref.shape != tuple(expected[name])
    ]
    if problems:
        raise ValueError(
            f"{where}: the tensors do not fit the config: " + join(problems)
        )


def join(problems: list[str], most: int = 12) -> str:
    """Return problems as one line, cut after the first few with a count."""
    shown = "; ".join(problems[:most])
    left = len(problems) - most
    return f"{shown}; and {left} more" if left > 0 else shown
