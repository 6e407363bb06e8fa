"""Writing a checkpoint: all of it or nothing, and never all of it in memory.

A folder is written beside its place under a temporary name and renamed into it at
the end; whatever goes wrong, the temporary is removed. Parameters go to Orbax in
groups about as large as the largest tensor: one plain save would hold the model.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tqdm

from convert.source import Source
from jaxkv.config import ModelConfig
from jaxkv.device.llama import param_shapes
from jaxkv.engine.checkpoint import (
    CONFIG_FILE,
    FORMAT,
    FORMAT_VERSION,
    GENERATION_CONFIG_FILE,
    PARAMS_FOLDER,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    group_by_bytes,
    read_json,
)

THREADS_END_S = 1.0
"""Longest wait for Orbax's threads after a failure."""

CHECKPOINT_NAMES = frozenset(
    (
        CONFIG_FILE,
        PARAMS_FOLDER,
        TOKENIZER_FILE,
        TOKENIZER_CONFIG_FILE,
        GENERATION_CONFIG_FILE,
    )
)


def is_checkpoint(folder: Path) -> bool:
    """Say whether a folder is a converted checkpoint and nothing else."""
    names = {entry.name for entry in folder.iterdir()}
    if not names <= CHECKPOINT_NAMES or CONFIG_FILE not in names:
        return False
    try:
        return read_json(folder / CONFIG_FILE).get("format") == FORMAT
    except ValueError:
        return False


def check_destination(
    destination: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]
) -> None:
    """Refuse a destination that is taken.

    Args:
        destination: The folder to be.
        overwrite: Whether a folder of the same kind may be replaced.
        is_ours: Says whether a folder holds what would be written there, and nothing
            else. Only such a folder, or an empty one, is ever replaced.

    Raises:
        ValueError: It exists and may not be replaced; names it.
    """
    if not destination.exists():
        return
    if not destination.is_dir():
        raise ValueError(f"{destination} is a file; the destination must be a folder")
    if not overwrite:
        raise ValueError(f"{destination} exists already; --overwrite replaces it")
    if not is_ours(destination) and any(destination.iterdir()):
        raise ValueError(
            f"{destination} holds more than what this command writes, so that it is "
            "not replaced; remove it first, or choose another place"
        )


@contextlib.contextmanager
def new_folder(
    destination: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]
) -> Iterator[Path]:
    """Give an empty folder that becomes `destination` if the block succeeds.

    Arguments and errors are those of `check_destination`. If the block raises, the
    folder is removed, with parents made for it, and the destination stays as it was.
    """
    destination = destination.resolve()
    check_destination(destination, overwrite=overwrite, is_ours=is_ours)
    created = [parent for parent in destination.parents if not parent.exists()]
    tag = f"{destination.name}.{{}}-{os.getpid()}"
    temporary = destination.with_name("." + tag.format("incomplete"))
    replaced = destination.with_name("." + tag.format("replaced"))
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(destination)
        temporary.mkdir()
        yield temporary
        # Again: it may have been taken while we were writing.
        check_destination(destination, overwrite=overwrite, is_ours=is_ours)
        if destination.exists():
            destination.rename(replaced)
        try:
            temporary.rename(destination)
        except OSError:
            if replaced.exists():
                replaced.rename(destination)
            raise
    except BaseException:
        _remove_for_good(temporary)
        with contextlib.suppress(OSError):  # somebody else uses one by now
            for parent in created:
                parent.rmdir()
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_for_good(folder: Path) -> None:
    """Remove a folder that TensorStore's threads may still be writing to.

    They tell nobody when they are done, and make the folder again.
    """
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
        if not folder.exists():
            return
    shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(destination: Path) -> None:
    """Remove what processes that were killed left beside a destination."""
    prefix = f".{destination.name}.incomplete-"
    for entry in list(destination.parent.iterdir()):
        pid = entry.name.removeprefix(prefix)
        if not entry.name.startswith(prefix) or not pid.isdecimal():
            continue
        if int(pid) == os.getpid() or not _is_running(int(pid)):
            shutil.rmtree(entry, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is somebody else's
        return True
    return True


def write_checkpoint(
    source: Source,
    destination: Path,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write an opened source as a checkpoint.

    Args:
        source: Every parameter is loaded from it once, one after another.
        destination: A folder that does not exist yet, or may be replaced.
        dtype: Of all parameters; `auto` keeps the source's.
        overwrite: Replace a checkpoint that is there.
        progress: Show a progress bar, in bytes, on stderr.

    Raises:
        ValueError: The destination is taken, or a value does not fit the dtype.
        OSError: The parameters could not be saved.
    """
    config = source.config
    if dtype != "auto":
        config = dataclasses.replace(config, dtype=dtype)
    with (
        _quiet_orbax(),  # until the folder is removed, should something fail
        new_folder(destination, overwrite=overwrite, is_ours=is_checkpoint) as folder,
    ):
        write_json(
            folder / CONFIG_FILE,
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "model": config.to_json(),
            },
        )
        write_json(folder / GENERATION_CONFIG_FILE, source.generation_config)
        if source.tokenizer_json is not None:
            # The class reads tokenizer.json as it is; one that transformers chose by
            # model_type might rebuild it.
            settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
            settings |= source.tokenizer_config
            write_json(folder / TOKENIZER_CONFIG_FILE, settings)
            (folder / TOKENIZER_FILE).write_bytes(source.tokenizer_json.encode("utf-8"))
        _write_params(folder / PARAMS_FOLDER, destination, config, source, progress)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write an object as indented UTF-8 JSON."""
    path.write_text(
        json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def byte_bar(total: int, title: str, progress: bool) -> tqdm.tqdm:
    """Return the one progress bar of a command; it shows nothing unless asked to."""
    return tqdm.tqdm(
        total=total,
        desc=title,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not progress,
    )


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Let a save fail with its exception alone.

    Orbax saves in threads, which log what they raise, with tracebacks. Nothing of it
    is shown, and those that still run after a failure are waited for.
    """
    before = set(threading.enumerate())
    show_exception, show_unraisable = threading.excepthook, sys.unraisablehook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        if args.thread in before:
            show_exception(args)

    def unraisablehook(args: "sys.UnraisableHookArgs") -> None:
        if args.object is not None:  # TensorStore's threads name no object
            show_unraisable(args)

    def is_minor(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(is_minor)
    threading.excepthook = excepthook
    sys.unraisablehook = unraisablehook
    try:
        yield
    except BaseException:
        deadline = time.monotonic() + THREADS_END_S
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon:
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        threading.excepthook, sys.unraisablehook = show_exception, show_unraisable
        for logger in loggers:
            logger.removeFilter(is_minor)


def _write_params(
    folder: Path,
    destination: Path,
    config: ModelConfig,
    source: Source,
    progress: bool,
) -> None:
    dtype = np.dtype(config.dtype)
    sizes = {
        name: source.tensors[name].num_elements * dtype.itemsize
        for name in param_shapes(config)
    }
    # Orbax is called in a thread, which an interrupt waits for: its event loop would
    # not notice the interrupt, and would write files again after they are removed.
    bar = byte_bar(sum(sizes.values()), "converting", progress)
    with bar, ThreadPoolExecutor(1) as executor:
        for names in group_by_bytes(sizes):
            # No variable: it would keep this group while the next one is loaded.
            _call(
                executor,
                destination,
                ocp.partial.save,
                str(folder),
                {name: _load_as(source, name, dtype) for name in names},
            )
            bar.update(sum(sizes[name] for name in names))
        _call(executor, destination, ocp.partial.finalize, str(folder))


def _call(
    executor: ThreadPoolExecutor,
    destination: Path,
    function: Callable[..., object],
    *args: object,
) -> None:
    """Call Orbax; what it raises becomes one sentence."""
    try:
        executor.submit(function, *args).result()
    except Exception as error:  # many kinds, some with a trace of many lines
        lines = str(error).splitlines() or [type(error).__name__]
        raise OSError(f"{destination} could not be written: {lines[0]}") from error


def _load_as(source: Source, name: str, dtype: np.dtype) -> np.ndarray:
    """Load one tensor and cast it, rounding to nearest."""
    ref = source.tensors[name]
    array = ref.load()
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.itemsize < array.dtype.itemsize or dtype == np.float16:
        fits = np.isfinite(cast) == np.isfinite(array)
        if not fits.all():
            raise ValueError(
                f"{source.where}: {ref.name} has values beyond the range of "
                f"{dtype.name}"
            )
    return cast
