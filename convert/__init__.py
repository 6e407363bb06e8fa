"""Hugging Face folders and GGUF files to jaxkv checkpoints, and back."""

import os
from pathlib import Path

from convert.export import write_huggingface
from convert.huggingface import open_huggingface
from convert.source import Source
from convert.writer import check_destination, is_checkpoint, write_checkpoint

__all__ = ["convert_checkpoint", "export_checkpoint"]

DTYPES = ("auto", "float32", "bfloat16", "float16")


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: str = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Convert a Hugging Face folder or a GGUF file to a checkpoint.

    Peak memory stays near the size of the largest tensors. `dst` appears complete or
    not at all.

    Args:
        src: A folder with `config.json` and safetensors, or a `.gguf` file.
        dst: The folder to write. It must not exist, unless `overwrite`.
        dtype: `float32`, `bfloat16` or `float16`; `auto` keeps the source's, which is
            float32 for a quantised GGUF file.
        overwrite: Replace a converted checkpoint, or an empty folder, at `dst`.
        progress: Show one progress bar on stderr.

    Raises:
        ValueError: One sentence that names what is wrong with the source or with the
            destination; nothing has been written then.
        OSError: The destination cannot be written; it is as it was then.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}")
    destination = Path(dst)
    check_destination(destination, overwrite=overwrite, is_ours=is_checkpoint)
    write_checkpoint(
        _open_source(Path(src)),
        destination,
        dtype=dtype,
        overwrite=overwrite,
        progress=progress,
    )


def export_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write a converted checkpoint back as a Hugging Face folder.

    Converting that folder again gives the same checkpoint, bit for bit.

    Args:
        src: A converted checkpoint.
        dst: The folder to write. It must not exist, unless `overwrite`.
        overwrite: Replace an earlier export, or an empty folder, at `dst`.
        progress: Show one progress bar on stderr.

    Raises:
        ValueError: One sentence that names what is wrong with the source or with the
            destination; nothing has been written then.
    """
    write_huggingface(Path(src), Path(dst), overwrite=overwrite, progress=progress)


def _open_source(path: Path) -> Source:
    if path.is_dir():
        return open_huggingface(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a folder")
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"{path} is neither a Hugging Face folder nor a .gguf file")
    from convert.gguf_file import open_gguf

    return open_gguf(path)
