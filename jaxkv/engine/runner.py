"""Runs batches on the device: parameters, the cache, and one executable a bucket.

Executables are compiled ahead of time and called as such, so a step can compile
nothing by accident: arguments of another shape or sharding are an error.
"""

import functools
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from jaxkv.config import NULL_BLOCK, CacheConfig, ModelConfig
from jaxkv.device.cache import (
    LayerKV,
    copy_blocks,
    gather_blocks,
    init_cache,
    poison_blocks,
    scatter_blocks,
)
from jaxkv.device.llama import Params, check_params, param_shapes
from jaxkv.device.rows import init_rows, set_history, set_rows
from jaxkv.device.sampling import PRNG_IMPL
from jaxkv.device.step import GPU_COMPILER_OPTIONS, Batch, StepOutput, make_step
from jaxkv.engine.batch import BatchBuilder, Bucket, NewRows
from jaxkv.engine.memory_advice import start_collapsing

_COPIES = 8  # blocks a call
_POISONED = 16  # likewise
_NEW_ROWS = 8  # likewise
_SWAPS = (8, 1)  # blocks a call; host memory is taken for no more than there are


class Runner(Protocol):
    """What an engine needs of a device: `ModelRunner`, or a script in tests."""

    num_compilations: int
    compile_seconds: float

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), before the next step."""
        ...

    def swap_out(self, block_ids: Sequence[int]) -> Any:
        """Copy blocks to host memory before the next step; return what keeps them."""
        ...

    def swap_in(self, content: Any, block_ids: Sequence[int]) -> None:
        """Copy blocks back, NULL_BLOCK for those not wanted, before the next step."""
        ...

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with what no step can read unnoticed."""
        ...

    def set_rows(self, new_rows: NewRows) -> None:
        """Give rows to other requests before the next step."""
        ...

    def dispatch(self, batch: Batch, num_steps: int = 1) -> Any:
        """Start a step; return at once what `collect` takes."""
        ...

    def collect(self, dispatched: Any) -> StepOutput:
        """Wait for a step that was dispatched; return its results on the host."""
        ...


class ModelRunner:
    """A model, its cache and the state of its rows on the device."""

    def __init__(
        self,
        params: Params,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        builder: BatchBuilder,
        *,
        num_token_ids: int,
        attention_implementation: str,
    ):
        """Put the parameters in order and allocate the cache and the rows.

        Raises:
            ValueError: The parameters do not fit the model config.
        """
        check_params(model_config, params)
        dtype = jnp.dtype(model_config.dtype)
        self._params = tuple(
            jnp.asarray(params[name], dtype) for name in param_shapes(model_config)
        )
        self._cache = init_cache(cache_config)
        start_collapsing(jax.tree.leaves((self._params, self._cache)))
        array = jax.tree.leaves(self._cache)[0]
        self._device_memory = array.sharding
        self._host_memory = _memory(array, "pinned_host")
        (platform,) = {device.platform for device in array.devices()}
        self._compiler_options = GPU_COMPILER_OPTIONS if platform == "gpu" else None
        self._builder = builder
        self._rows = init_rows(
            builder.max_num_seqs,
            builder.table_width,
            builder.max_model_len,
            builder.vocab_size,
        )
        self._make_step = functools.partial(
            make_step,
            model_config,
            num_token_ids=num_token_ids,
            attention_implementation=attention_implementation,
        )
        self._moves = {
            name: jax.jit(move, donate_argnums=donated)
            for name, move, donated in (
                ("copy", copy_blocks, (0,)),
                ("out", gather_blocks, ()),
                ("in", scatter_blocks, (0,)),
                ("poison", poison_blocks, (0,)),
                ("rows", set_rows, (0,)),
                ("history", set_history, (0,)),
            )
        }
        self._move_executables: dict[tuple[str, int], Callable] = {}
        self._executables: dict[tuple[Bucket, int], Callable] = {}
        self.num_compilations = 0
        self.compile_seconds = 0.0

    def compile(
        self, variants: Iterable[tuple[Bucket, int]], use_tqdm: bool = False
    ) -> None:
        """Compile the steps of buckets, each with its number of steps in one.

        Several at a time: the compiler hardly uses a second core for one.
        """

        def lower(variant: tuple[Bucket, int]) -> jax.stages.Lowered:
            step = jax.jit(self._make_step(num_steps=variant[1]), donate_argnums=(1, 2))
            batch = self._builder.empty(*variant)
            return step.lower(self._params, self._cache, self._rows, batch)

        start = time.perf_counter()
        missing = [v for v in variants if v not in self._executables]
        # The largest first, so that none is left alone at the end.
        missing.sort(key=lambda variant: -variant[0].tokens)
        bar = tqdm.tqdm(
            total=len(missing), desc="Compiling", delay=1.0, disable=not use_tqdm
        )
        with bar, ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
            futures = []
            for variant in missing:
                # In this thread, since JAX's contexts belong to it.
                lowered = lower(variant)
                future = threads.submit(lowered.compile, self._compiler_options)
                future.add_done_callback(lambda _: bar.update())
                futures.append(future)
            for variant, future in zip(missing, futures, strict=True):
                self._executables[variant] = future.result()
                self.num_compilations += 1
        self.compile_seconds += time.perf_counter() - start

    def compile_moves(self, *, swaps: bool, poison: bool) -> None:
        """Compile the copying of blocks, and, if asked for, swapping and poisoning."""
        nobody = self._builder.no_rows(1)
        nobody.histories[nobody.rows[0]] = []
        self.set_rows(nobody)
        self.copy_blocks([(NULL_BLOCK, NULL_BLOCK)])
        if poison:
            self.poison_blocks([1])  # it holds nothing yet
        if swaps:
            for num_blocks in _SWAPS:
                block_ids = [1] * num_blocks  # its own content goes back
                self.swap_in(self.swap_out(block_ids), block_ids)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in every layer; the cache goes in donated.

        Args:
            copies: (from, to); no block is a target twice, or both.
        """
        for begin in range(0, len(copies), _COPIES):
            padded = np.zeros((2, _COPIES), np.int32)
            part = np.asarray(copies[begin : begin + _COPIES], np.int32)
            padded[:, : len(part)] = part.T
            self._cache = self._move("copy", _COPIES, self._cache, *padded)

    def swap_out(self, block_ids: Sequence[int]) -> list[tuple[LayerKV, ...]]:
        """Copy blocks of every layer to host memory, pinned where there is such.

        It returns at once. The blocks may be overwritten by whatever is dispatched
        later: they are copied on the device first.

        Returns:
            Their content, in parts; the memory goes with the arrays.
        """
        content = []
        for begin, num_blocks in _parts(len(block_ids)):
            ids = np.asarray(block_ids[begin : begin + num_blocks], np.int32)
            staged = self._move("out", num_blocks, self._cache, ids)
            on_host = self._host_memory
            content.append(
                jax.device_get(staged)
                if on_host is None
                else jax.device_put(staged, on_host)
            )
        return content

    def swap_in(
        self, content: list[tuple[LayerKV, ...]], block_ids: Sequence[int]
    ) -> None:
        """Copy back what `swap_out` returned; the cache goes in donated.

        Args:
            content: Kept, and may be copied back again.
            block_ids: A block for each; NULL_BLOCK for those not wanted.
        """
        parts = zip(_parts(len(block_ids)), content, strict=True)
        for (begin, num_blocks), part in parts:
            ids = np.asarray(block_ids[begin : begin + num_blocks], np.int32)
            if ids.any():
                staged = jax.device_put(part, self._device_memory)
                self._cache = self._move("in", num_blocks, self._cache, staged, ids)

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Fill blocks of every layer with NaN; the cache goes in donated."""
        for begin in range(0, len(block_ids), _POISONED):
            part = np.asarray(block_ids[begin : begin + _POISONED], np.int32)
            padded = np.resize(part, _POISONED)  # what is lacking is filled twice
            self._cache = self._move("poison", _POISONED, self._cache, padded)

    def set_rows(self, new_rows: NewRows) -> None:
        """Set what the device keeps of rows; its state goes in donated."""
        rows = np.asarray(new_rows.rows, np.int32)
        for begin in range(0, len(rows), _NEW_ROWS):
            lines = np.arange(begin, begin + _NEW_ROWS)
            lines = np.minimum(lines, len(rows) - 1)  # the last is set again
            arrays = (rows, new_rows.block_tables, new_rows.params)
            part = jax.tree.map(operator.itemgetter(lines), arrays)
            self._rows = self._move("rows", _NEW_ROWS, self._rows, *part)
        for row, token_ids in new_rows.histories.items():
            history = np.zeros((1, self._builder.max_model_len), np.int32)
            history[0, : len(token_ids)] = token_ids
            which = np.asarray([row], np.int32)
            num_tokens = np.asarray([len(token_ids)], np.int32)
            self._rows = self._move(
                "history", 1, self._rows, which, num_tokens, history
            )

    def _move(self, name: str, count: int, *arguments: Any) -> Any:
        """Run a function that moves so many; compile it if this is the first use."""
        executable = self._move_executables.get((name, count))
        if executable is None:
            start = time.perf_counter()
            executable = self._moves[name].lower(*arguments).compile()
            self._move_executables[name, count] = executable
            self.num_compilations += 1
            self.compile_seconds += time.perf_counter() - start
        return executable(*arguments)

    def wait(self) -> None:
        """Wait until everything that was dispatched is done."""
        jax.block_until_ready(self._cache)

    def dispatch(self, batch: Batch, num_steps: int = 1) -> StepOutput:
        """Start a step; compile its bucket if this is the first use.

        The cache and the rows go in donated and their successors take their places.

        Returns:
            What is on its way to the host, for `collect`: the output, less what
            nobody wants.
        """
        variant = _bucket_of(batch), num_steps
        if variant not in self._executables:
            self.compile([variant])
        output, self._cache, self._rows = self._executables[variant](
            self._params, self._cache, self._rows, batch
        )
        if not batch.wants_logprobs:
            output = output._replace(logprobs=None)
        if not batch.wants_prompt_logprobs:
            output = output._replace(prompt_logprobs=None)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        return output

    def collect(self, dispatched: StepOutput) -> StepOutput:
        """Wait for a step; return its output as numpy arrays."""
        return jax.device_get(dispatched)


def _parts(num_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield (first, how many) of the parts that blocks are swapped in."""
    begin = 0
    for size in _SWAPS:
        while num_blocks - begin >= size:
            yield begin, size
            begin += size


def _memory(array: jax.Array, kind: str) -> jax.sharding.Sharding | None:
    """Return the sharding in another kind of memory, where the device has it."""
    device = next(iter(array.devices()))
    if kind in {memory.kind for memory in device.addressable_memories()}:
        return array.sharding.with_memory_kind(kind)
    return None


def _bucket_of(batch: Batch) -> Bucket:
    return Bucket(rows=len(batch.rows), tokens=len(batch.token_ids))


class RequestKeys:
    """Derives each request's random key data; compiles nothing once it is made."""

    def __init__(self, engine_seed: int):
        self._engine_seed = np.uint32(engine_seed)
        self._seeded, self._unseeded = _key_functions()

    def derive(self, seed: int | None, arrival: int, child: int) -> np.ndarray:
        """Return uint32 [2] key data: of the seed, or of the order of arrival."""
        if seed is None:
            place = np.uint32(arrival % 2**32)
            data = self._unseeded(self._engine_seed, place, np.uint32(child))
        else:
            data = self._seeded(np.uint32(seed), np.uint32(child))
        return np.asarray(data)


@functools.cache
def _key_functions() -> tuple[Callable, Callable]:
    """Compile, once for all engines, what derives keys: seeded ones and others."""

    def seeded(seed: jax.Array, child: jax.Array) -> jax.Array:
        return _key_data(jax.random.fold_in(_key(seed), child))

    def unseeded(seed: jax.Array, arrival: jax.Array, child: jax.Array) -> jax.Array:
        key = jax.random.fold_in(_key(seed), arrival)
        return _key_data(jax.random.fold_in(key, child))

    zero = np.uint32(0)
    return (
        jax.jit(seeded).lower(zero, zero).compile(),
        jax.jit(unseeded).lower(zero, zero, zero).compile(),
    )


def _key(seed: jax.Array | np.uint32) -> jax.Array:
    return jax.random.key(seed, impl=PRNG_IMPL)


def _key_data(key: jax.Array) -> jax.Array:
    return jax.random.key_data(key)
