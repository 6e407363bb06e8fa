"""`Engine`: requests in, a step at a time, outputs out.

One step is schedule, build, dispatch, collect, commit; everything else here is
bookkeeping around it: what the user gave, what was generated, what is to be reported.
With `async_scheduling` the next step is dispatched before the last one is collected, so
that the device has work while the host does its own.
"""

import dataclasses
import logging
import operator
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv.config import NULL_BLOCK, CacheConfig, EngineConfig, ModelConfig
from jaxkv.device.dense import skips_padding
from jaxkv.device.llama import Params
from jaxkv.device.sampling import Logprobs
from jaxkv.device.step import StepOutput
from jaxkv.engine.batch import (
    BatchBuilder,
    Ladder,
    few_buckets,
    make_buckets,
    wants_prompt_logprobs,
)
from jaxkv.engine.beams import BeamRecord
from jaxkv.engine.block_debug import BlockDebugger
from jaxkv.engine.calibration import measure_prefill_rate, measure_swap_bandwidth
from jaxkv.engine.checks import EngineLimits, RequestChecks
from jaxkv.engine.outputs import EngineStats, RequestOutput
from jaxkv.engine.records import RequestRecord, make_detokenizer
from jaxkv.engine.runner import ModelRunner, RequestKeys, Runner
from jaxkv.engine.sizing import check_fits, choose_num_blocks, num_swap_blocks
from jaxkv.host.beam_search import BeamSearchParams
from jaxkv.host.preemption import Preemption
from jaxkv.host.request import CacheKey, Request, SamplingParams
from jaxkv.host.schedule import Schedule, ScheduledRow
from jaxkv.host.scheduler import Scheduler

_LOGGER = logging.getLogger(__name__)
# Where nothing was measured: GB a second, and tokens a second.
_SWAP_BANDWIDTH = 10.0
_PREFILL_RATE = 10_000.0


class _Step(NamedTuple):
    """A step that is under way."""

    schedule: Schedule
    dispatched: Any  # what `Runner.collect` takes


class Engine:
    """Continuous batching over a paged KV cache.

    It belongs to one thread: no method may be called while another runs.
    """

    def __init__(
        self,
        runner: Runner,
        builder: BatchBuilder,
        limits: EngineLimits,
        config: EngineConfig,
        tokenizer: Any | None = None,
    ):
        """Drive a runner; most callers want `from_params`.

        Args:
            runner: What runs batches.
            builder: What makes them; see `make_builder`.
            limits: Sizes of the runner's model and cache.
            config: How to schedule.
            tokenizer: Anything with encode(str) and decode(ids); without one, text
                is "" and a stop string is an error.
        """
        self.config = config
        self.limits = limits
        self.tokenizer = tokenizer
        self._checks = RequestChecks(limits, config, tokenizer)
        self._bytes_per_block = limits.kv_bytes_per_token * config.block_size
        self.scheduler = Scheduler(
            num_blocks=limits.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.policy,
            enable_prefix_caching=config.enable_prefix_caching,
            max_num_partial_prefills=config.max_num_partial_prefills,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            num_swap_blocks=num_swap_blocks(config, self._bytes_per_block),
            preemption=Preemption(
                how=config.preemption,
                bytes_per_block=self._bytes_per_block,
                swap_bandwidth=1e9 * (config.swap_bandwidth or _SWAP_BANDWIDTH),
                prefill_rate=config.prefill_rate or _PREFILL_RATE,
            ),
            multi_step=config.multi_step,
            root=limits.block_root,
        )
        self._runner = runner
        self._builder = builder
        self._under_way: deque[_Step] = deque()  # in the order of their dispatch
        self._debugger = (
            BlockDebugger(self.scheduler, runner) if config.debug_blocks else None
        )
        self._request_keys = RequestKeys(config.seed)
        self._keys: dict[str, np.ndarray] = {}  # of requests that draw, by child id
        # Unfinished ones, by request id.
        self._records: dict[str, RequestRecord | BeamRecord] = {}
        self._by_child: dict[str, RequestRecord | BeamRecord] = {}
        # Aborted since the last step, or touched by one that raised after its commit.
        self._unreported: list[RequestRecord | BeamRecord] = []
        self._num_arrivals = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._peak_held_blocks = 0
        self._num_swapped_out = 0  # blocks
        self._num_swapped_in = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._device_seconds = 0.0

    @classmethod
    def from_params(
        cls,
        params: Params,
        model_config: ModelConfig,
        config: EngineConfig | None = None,
        tokenizer: Any | None = None,
        use_tqdm: bool = False,
    ) -> "Engine":
        """Make an engine for a Llama-architecture model.

        Args:
            params: Flat state by dotted name, as `tiny_llama` and `load_params`
                return it. Kept, and never donated.
            model_config: The model's config.
            config: How to run it; None: the defaults.
            tokenizer: See `Engine`. One with `num_token_ids` also says which rows
                of the vocabulary are padding.
            use_tqdm: Show a progress bar while steps are compiled.

        Raises:
            ValueError: Parameters, configs or limits do not fit each other.
        """
        config = config or EngineConfig()
        if config.dtype != "auto":
            model_config = dataclasses.replace(model_config, dtype=config.dtype)
        max_model_len = _max_model_len(model_config, config)
        cache_config = CacheConfig(
            num_layers=model_config.num_hidden_layers,
            num_kv_heads=model_config.num_key_value_heads,
            head_dim=model_config.head_dim,
            num_blocks=config.num_blocks or 2,
            block_size=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            dtype=model_config.dtype,
            skip_layers=config.kv_cache_skip_layers,
            rotation=config.kv_cache_rotation,
            kv_scales=model_config.kv_scales,
        )
        if config.num_blocks is None:
            num_blocks = choose_num_blocks(cache_config, config, max_model_len)
            cache_config = dataclasses.replace(cache_config, num_blocks=num_blocks)
        check_fits(cache_config)
        _report_unused_scales(cache_config)
        vocab_size = model_config.vocab_size
        limits = EngineLimits(
            num_blocks=cache_config.num_blocks,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            num_token_ids=min(
                vocab_size, getattr(tokenizer, "num_token_ids", vocab_size)
            ),
            eos_token_ids=model_config.eos_token_ids,
            kv_bytes_per_token=cache_config.bytes_per_token,
            block_root=cache_config.block_root,
        )
        builder = make_builder(
            limits, config, _ladder(model_config, cache_config, config)
        )
        runner = ModelRunner(
            params,
            model_config,
            cache_config,
            builder,
            num_token_ids=limits.num_token_ids,
            attention_implementation=config.attention_implementation,
        )
        engine = cls(runner, builder, limits, config, tokenizer)
        if config.warmup == "eager":
            runner.compile(builder.variants(config.multi_step), use_tqdm)
            runner.compile_moves(
                swaps=config.swap_space > 0, poison=config.debug_blocks
            )
        if config.swap_space > 0 and config.preemption == "auto":
            engine._calibrate(runner)
        return engine

    def _calibrate(self, runner: ModelRunner) -> None:
        """Measure what the choice of preemption needs and the config does not say."""
        measured = {}
        if self.config.swap_bandwidth is None:
            measured["swap_bandwidth"] = measure_swap_bandwidth(
                runner, self._bytes_per_block
            )
        if self.config.prefill_rate is None:
            measured["prefill_rate"] = measure_prefill_rate(runner, self._builder)
        self.scheduler.preemption = dataclasses.replace(
            self.scheduler.preemption, **measured
        )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        priority: int = 0,
        cache_salt: CacheKey | None = None,
        adapter: CacheKey | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: Must not be that of an unfinished request.
            prompt_token_ids: At least one id, each inside the vocabulary.
            sampling_params: None: the defaults. With BeamSearchParams it is a beam
                search, which is reported once, when it ends.
            priority: Lower is more urgent; with `policy="priority"` only.
            cache_salt: Its blocks are shared only with requests of the same one.
            adapter: Names one load of whatever else changes K and V; enters the
                digests of its blocks and does nothing else.

        Raises:
            ValueError: Something is wrong with the request, or it could never fit;
                nothing was queued.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        prompt = self.check_request(prompt_token_ids, params)
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._records:
            raise ValueError(f"request id {request_id!r} is already in use")
        if not isinstance(priority, int | np.integer) or isinstance(priority, bool):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        priority = int(priority)
        for name, value in (("cache_salt", cache_salt), ("adapter", adapter)):
            if value is not None and type(value) not in (str, bytes, int):
                raise ValueError(
                    f"{name} must be a string, bytes or an integer, got {value!r}"
                )
        options = {"priority": priority, "cache_salt": cache_salt, "adapter": adapter}
        if isinstance(params, BeamSearchParams):
            record = self._make_beams(request_id, prompt, params, **options)
            self.scheduler.add(record.children[0])
        else:
            record = self._make_record(request_id, prompt, params, **options)
            for child in record.children:
                self.scheduler.add(child)
        self._num_arrivals += 1
        self._records[request_id] = record
        for child in record.children:
            self._by_child[child.request_id] = record

    def check_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
    ) -> list[int]:
        """Check a request as `add_request` would, without queueing it.

        Returns:
            The prompt as a list of Python integers.

        Raises:
            ValueError: As `add_request`.
        """
        return self._checks.check(prompt_token_ids, params)

    def abort_request(self, request_id: str) -> None:
        """End a request; the next step reports it. An unknown id is ignored."""
        record = self._records.get(request_id)
        if record is None:
            return
        for child in record.children:
            self.scheduler.abort(child.request_id)
        self._forget(record)
        self._unreported.append(record)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        return bool(self._records or self._unreported)

    def step(self) -> list[RequestOutput]:
        """Run one step.

        With `async_scheduling` it dispatches a step and takes the results of the one
        before, if there is one.

        Returns:
            Outputs of the requests that got a token or ended, in order of arrival.
        """
        start = time.perf_counter()
        if self._under_way and not self.scheduler.can_run_ahead():
            self._finish_first()
        schedule = self.scheduler.schedule()
        if schedule.rows:
            self._dispatch(schedule)
        may_lag = self.config.async_scheduling and bool(schedule.rows)
        while len(self._under_way) > (may_lag and bool(self._records)):
            self._finish_first()
        outputs = self._report()
        self._step_seconds += time.perf_counter() - start
        return outputs

    def _report(self) -> list[RequestOutput]:
        """Return the outputs of all that have something to report.

        What the user's tokenizer raised is raised here, once; everybody else's report
        is kept for the next step then.
        """
        outputs: list[RequestOutput] = []
        for record in dict.fromkeys(self._unreported):
            try:
                outputs.append(record.output())
            except Exception:
                self._unreported = [r for r in self._unreported if r is not record]
                raise
        self._unreported = []
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, so that no later request finds one.

        Call it when the parameters have changed. Requests that run keep what they
        have, and nobody will find what they compute.

        Returns:
            True.
        """
        self.scheduler.reset_prefix_cache()
        return True

    def stats(self) -> EngineStats:
        """Return a snapshot of blocks, queues and counters."""
        pool = self.scheduler.pool
        return EngineStats(
            total_blocks=self.limits.num_blocks - 1,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            held_blocks=pool.num_held,
            peak_held_blocks=self._peak_held_blocks,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_swapped=self.scheduler.num_swapped,
            num_preemptions=self.scheduler.num_preemptions,
            num_swapped_out_bytes=self._num_swapped_out * self._bytes_per_block,
            num_swapped_in_bytes=self._num_swapped_in * self._bytes_per_block,
            prefix_queries=self.scheduler.prefix_cache.num_queries,
            prefix_hits=self.scheduler.prefix_cache.num_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_compilations=self._runner.num_compilations,
            compile_seconds=self._runner.compile_seconds,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            device_seconds=self._device_seconds,
        )

    def _make_record(
        self, request_id: str, prompt: list[int], params: SamplingParams, **options: Any
    ) -> RequestRecord:
        """Make what is kept of a request, its n outputs with ids and keys of their own.

        The first computes the prompt for all.
        """
        record = RequestRecord(request_id, prompt, params)
        for child in range(params.n):
            detokenizer = make_detokenizer(self.tokenizer, prompt, params)
            request = Request(
                f"{child}/{request_id}",
                prompt,
                params,
                max_total_tokens=self._checks.max_total_tokens(
                    len(prompt), params.max_tokens
                ),
                eos_token_ids=self.limits.eos_token_ids,
                child=child,
                source=record.children[0] if child else None,
                text_stop=detokenizer,
                **options,
            )
            record.add_child(request, detokenizer)
            if not params.is_greedy:
                self._keys[request.request_id] = self._request_keys.derive(
                    params.seed, self._num_arrivals, child
                )
        return record

    def _make_beams(
        self,
        request_id: str,
        prompt: list[int],
        params: BeamSearchParams,
        **options: Any,
    ) -> BeamRecord:
        return BeamRecord(
            request_id,
            prompt,
            params,
            max_total_tokens=self._checks.max_total_tokens(
                len(prompt), params.max_tokens
            ),
            eos_token_ids=self.limits.eos_token_ids,
            tokenizer=self.tokenizer,
            **options,
        )

    def _dispatch(self, schedule: Schedule) -> None:
        """Start what was scheduled; a failed step leaves what is under way undone."""
        self._peak_held_blocks = max(
            self._peak_held_blocks, self.scheduler.pool.num_held
        )
        try:
            new_rows, batch = self._builder.build(
                schedule, self.scheduler.block_tables.table, self._keys.__getitem__
            )
            if self._debugger is not None:
                self._debugger.check(schedule)
            start = time.perf_counter()
            self._runner.set_rows(new_rows)
            self._move_blocks(schedule)
            dispatched = self._runner.dispatch(batch, schedule.num_steps)
        except BaseException:
            # It may have run all the same; then what the device knows of the rows is
            # no more what the steps before it left.
            self._discard(schedule)
            self._discard_under_way()
            raise
        self._device_seconds += time.perf_counter() - start
        self._num_steps += schedule.num_steps
        self._under_way.append(_Step(schedule, dispatched))
        if self._debugger is not None:
            self._debugger.follow(schedule)

    def _finish_first(self) -> None:
        """Wait for the first step under way and take its results.

        If it failed, those behind it did too.
        """
        start = time.perf_counter()
        schedule, dispatched = self._under_way[0]
        try:
            output = self._runner.collect(dispatched)
        except BaseException:
            self._discard_under_way()
            raise
        self._device_seconds += time.perf_counter() - start
        self._under_way.popleft()
        self._unreported += self._commit(schedule, output)
        if self._debugger is not None:
            self._debugger.finish()

    def _discard_under_way(self) -> None:
        """Forget all steps under way, the last one first."""
        while self._under_way:
            self._discard(self._under_way.pop().schedule)

    def _discard(self, schedule: Schedule) -> None:
        """Forget a step that failed, with what it may have told the device."""
        if self._debugger is not None:
            self._debugger.discard(schedule)
        self.scheduler.discard(schedule)
        self._builder.forget()

    def _move_blocks(self, schedule: Schedule) -> None:
        """Swap and copy blocks as the step needs them."""
        for swapped, block_ids in schedule.swap_outs:
            swapped.content = self._runner.swap_out(block_ids)
            self._num_swapped_out += len(block_ids)
        if self._debugger is not None:
            self._debugger.fill()
        for swapped, block_ids in schedule.swap_ins:
            self._runner.swap_in(swapped.content, block_ids)
            self._num_swapped_in += sum(i != NULL_BLOCK for i in block_ids)
        if schedule.copies:
            self._runner.copy_blocks(schedule.copies)

    def _commit(
        self, schedule: Schedule, output: StepOutput
    ) -> list[RequestRecord | BeamRecord]:
        """Give every request what the step made for it; return whom it concerns."""
        lines = self._lines_of(schedule)
        token_ids = np.asarray(output.token_ids)[:, : len(schedule.rows)].T
        self.scheduler.commit(
            schedule, token_ids[:, 0] if schedule.num_steps == 1 else token_ids
        )
        touched: dict[int, RequestRecord | BeamRecord] = {}
        searches: list[BeamRecord] = []
        for line, begin, row in lines:
            record = self._by_child[row.request.request_id]
            if isinstance(record, BeamRecord):
                if row.num_samples:
                    assert output.logprobs is not None, f"no logprobs for {record!r}"
                    logprobs = Logprobs(*(array[0] for array in output.logprobs))
                    record.take_candidates(row.request, logprobs, line)
                    searches.append(record)
                continue
            if wants_prompt_logprobs(row):
                assert output.prompt_logprobs is not None, f"none for {record!r}"
                record.take_prompt_logprobs(
                    output.prompt_logprobs, begin, row.start, row.num_tokens
                )
            if row.num_samples:
                self._take_tokens(record, row.request, output, line)
                touched[id(record)] = record
        for record in dict.fromkeys(searches):
            self._advance(record)
            if record.finished:
                touched[id(record)] = record
        for record in touched.values():
            if record.finished:
                self._forget(record)
        return sorted(touched.values(), key=operator.attrgetter("arrival"))

    def _lines_of(self, schedule: Schedule) -> list[tuple[int, int, ScheduledRow]]:
        """Return (line, its first token, row) of the rows that have not ended since."""
        lines = []
        begin = 0
        for line, row in enumerate(schedule.rows):
            if not row.is_stale:
                lines.append((line, begin, row))
            begin += row.num_tokens
        return lines

    def _take_tokens(
        self, record: RequestRecord, request: Request, output: StepOutput, line: int
    ) -> None:
        """Count and note the tokens that one of a record's requests has got."""
        num_new = record.take_tokens(request, output.logprobs, line)
        self._generation_tokens += num_new
        if request.num_output_tokens == num_new and request.child == 0:
            self._prompt_tokens += request.num_prompt_tokens

    def _advance(self, record: BeamRecord) -> None:
        """Let a beam search go on whose beams have computed their last tokens."""
        is_first = record.children[0].num_output_tokens == 0
        num_tokens = record.advance(self.scheduler)
        if num_tokens and is_first:
            self._prompt_tokens += len(record.prompt_token_ids)
        self._generation_tokens += num_tokens

    def _forget(self, record: RequestRecord | BeamRecord) -> None:
        del self._records[record.request_id]
        for child in record.children:
            del self._by_child[child.request_id]
            self._keys.pop(child.request_id, None)


def make_builder(
    limits: EngineLimits, config: EngineConfig, ladder: Ladder = make_buckets
) -> BatchBuilder:
    """Return what makes the batches of an engine, of the shapes that `ladder` lists."""
    return BatchBuilder(
        buckets=ladder(config.max_num_seqs, config.max_num_batched_tokens),
        block_size=config.block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
    )


def _ladder(
    model_config: ModelConfig, cache_config: CacheConfig, config: EngineConfig
) -> Ladder:
    """Choose the buckets: few where neither products nor attention compute padding."""
    has_zero_padding = not (model_config.mlp_bias or model_config.attention_output_bias)
    names = {kv_format.name for pair in cache_config.formats for kv_format in pair}
    if (
        has_zero_padding
        and names <= {"float32", "bfloat16"}
        and config.attention_implementation in ("auto", "cpu")
        and skips_padding(model_config.dtype)
    ):
        return few_buckets
    return make_buckets


def _report_unused_scales(cache_config: CacheConfig) -> None:
    """Name the calibrated scales that the formats have no use for."""
    unused = [
        f"{name}_scale of layer {layer}"
        for layer, scales in enumerate(cache_config.kv_scales)
        for name, kv_format in zip(("k", "v"), cache_config.formats[layer], strict=True)
        if scales is not None and kv_format.scale is None
    ]
    if unused:
        _LOGGER.warning(
            "kv_cache_dtype %r does not use calibrated scales of the model: %s",
            cache_config.kv_cache_dtype,
            ", ".join(unused),
        )


def _max_model_len(model_config: ModelConfig, config: EngineConfig) -> int:
    longest = model_config.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's "
            f"max_position_embeddings {longest}"
        )
    return config.max_model_len
