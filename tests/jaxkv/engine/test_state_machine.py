"""Whole engines under random use, on pools so small that everything collides.

After every rule the scheduler's invariants hold, every block is free, cached or held,
and every output is the beginning of what was predicted; `debug_blocks` checks the rest
in every step. Whatever was done, every request ends once, with what was predicted.
"""

import dataclasses
import functools
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxkv import BeamSearchParams, EngineConfig, SamplingParams
from jaxkv.host.beam_search import BeamSearch
from jaxkv.testing import scripted_engine
from tests.helpers import run_engine
from tests.jaxkv.engine.conftest import CONFIG, TinyModel
from tests.state_machines import settings_of

EOS = 2
MAX_TOKENS = 14
RUNNER_METHODS = [
    *("dispatch", "collect", "set_rows"),
    *("copy_blocks", "swap_out", "swap_in", "poison_blocks"),
]
DISTURBANCES = [
    *("abort", "reset", "abort swapped", "reset swapped"),
    *RUNNER_METHODS,
    *("copy_blocks", "swap_out", "swap_in"),
]
PROMPTS = st.one_of(
    st.lists(st.integers(3, 4), min_size=1, max_size=10),
    st.integers(1, 12).map(lambda length: ([3, 4, 4] * 4)[:length]),
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(1, MAX_TOKENS),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "beam_width": st.sampled_from([0, 0, 0, 2, 3]),
        "seed": st.integers(0, 1),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, None, None, "salt"]),
    }
)


class DeviceError(RuntimeError):
    """What a failing device raises here."""


class EngineMachine(RuleBasedStateMachine):
    """Add, step, fail, abort and reset; subclasses make engines and predict outputs.

    `expected` has the tokens of each of a request's outputs, by request id. Those of
    requests that ended stay there; `unfinished` and `aborted` say which have not.
    """

    num_steps = 0  # of all machines of a class
    num_preemptions = 0
    num_hits = 0
    num_searches = 0  # beam searches that went to their end
    num_swapped_in_bytes = 0

    def make_engine(self, **options):
        raise NotImplementedError

    def predict(self, prompt, params):
        """Tokens of each of the outputs."""
        raise NotImplementedError

    def start(self, options, requests):
        self.engine = self.make_engine(**options)
        self.expected = {}
        self.unfinished = set()
        self.aborted = set()
        self.num_added = 0
        self.add(requests)

    def add_request(self, prompt, priority, salt, n, beam_width, max_tokens, seed):
        # A greedy request has one output; the scripted model is greedy all the same.
        drawn = {"n": n, "seed": seed} if n > 1 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=max_tokens, **drawn)
        if beam_width:
            params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
        request_id = f"r{self.num_added}"
        self.num_added += 1
        limits = self.engine.limits
        total = min(len(prompt) + max_tokens, limits.max_model_len)
        num_slots = (limits.num_blocks - 1) * self.engine.config.block_size
        if len(prompt) >= limits.max_model_len or total - 1 > num_slots:
            with pytest.raises(ValueError, match=r"pool has|no room"):
                self.engine.add_request(request_id, prompt, params, priority, salt)
            return
        try:
            self.engine.check_request(prompt, params)
        except ValueError as error:
            assert str(error).startswith(f"beam_width {beam_width} ")  # noqa: PT017
            return
        self.expected[request_id] = self.predict(prompt, params)
        self.engine.add_request(request_id, prompt, params, priority, salt)
        self.unfinished.add(request_id)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests):
        for request in requests:
            self.add_request(**request)

    @precondition(lambda self: self.engine.has_unfinished_requests())
    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.take(self.engine.step())
            self.agrees()

    def take(self, outputs):
        """Check what a step reports."""
        for output in outputs:
            request_id = output.request_id
            assert request_id in self.unfinished, f"{request_id} ended before"
            expected = self.expected[request_id]
            if output.outputs and output.outputs[0].score is not None:
                self.take_hypotheses(output)
                continue
            reasons = [completion.finish_reason for completion in output.outputs]
            for completion in output.outputs:
                tokens = list(completion.token_ids)
                known = expected[completion.index]
                assert tokens == known[: len(tokens)]
                ended = completion.finish_reason in ("stop", "length")
                assert ended == (tokens == known)
            assert output.finished == (None not in reasons)
            assert ("abort" in reasons) <= (request_id in self.aborted)
            if output.finished:
                self.unfinished.remove(request_id)

    def take_hypotheses(self, output):
        assert output.finished
        if output.request_id not in self.aborted:
            tokens = [list(completion.token_ids) for completion in output.outputs]
            assert tokens == self.expected[output.request_id]
            type(self).num_searches += 1
        self.unfinished.remove(output.request_id)

    @precondition(lambda self: self.unfinished)
    @rule(what=st.sampled_from(DISTURBANCES), number=st.integers(0, 7))
    def disturb(self, what, number):
        """One rule, so that adding and running stay as frequent."""
        if what == "abort":
            unfinished = sorted(self.unfinished)
            self.abort_request(unfinished[number % len(unfinished)])
        elif what == "reset":
            self.reset_prefix_cache()
        elif what in ("abort swapped", "reset swapped"):
            self.wait_for_a_swap(what)
        else:
            for _ in range(1 + number // 4):
                self.fail(what, call=number & 1, after=bool(number & 2))

    def wait_for_a_swap(self, what):
        """Then abort who is in host memory, or forget what is there."""
        for _ in range(30):
            swapped = [r for r in self.engine.scheduler._waiting if r.swapped]
            if swapped and what == "abort swapped":
                self.abort_request(swapped[0].request_id.partition("/")[2])
            elif swapped:
                self.reset_prefix_cache()
            if swapped or not self.unfinished:
                break
            self.step(1)

    def fail(self, method, call, after):
        """Run until a call of a runner's method fails, if it comes so far."""
        with failing(self.engine._runner, method, call, after):
            for _ in range(30):
                if not self.engine.has_unfinished_requests():
                    break
                try:
                    outputs = self.engine.step()
                except DeviceError:
                    break
                self.take(outputs)
                self.agrees()

    def abort_request(self, request_id):
        self.engine.abort_request(request_id)
        self.aborted.add(request_id)

    def reset_prefix_cache(self):
        self.engine.reset_prefix_cache()
        assert self.engine.stats().cached_blocks == 0

    @invariant()
    def agrees(self):
        self.engine.scheduler.check_invariants()
        stats = self.engine.stats()
        num_blocks = stats.free_blocks + stats.cached_blocks + stats.held_blocks
        assert num_blocks == stats.total_blocks
        assert self.engine.has_unfinished_requests() == bool(self.unfinished)

    def teardown(self):
        """Whatever happened, all that is left finishes."""
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            self.step(1)
        assert not self.unfinished
        stats = self.engine.stats()
        assert (stats.held_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_swapped == self.engine.scheduler.swap_space.num_used == 0
        machine = type(self)
        machine.num_steps += stats.num_steps
        machine.num_preemptions += stats.num_preemptions
        machine.num_hits += stats.prefix_hits
        machine.num_swapped_in_bytes += stats.num_swapped_in_bytes


@contextmanager
def failing(runner, method, call, after):
    """Let one call of a runner's method fail, before or after it did its work."""
    works = getattr(runner, method)
    calls = iter(range(call, -1, -1))

    def fails(*arguments):
        is_this = next(calls, None) == 0
        result = None if is_this and not after else works(*arguments)
        if is_this:
            raise DeviceError
        return result

    setattr(runner, method, fails)
    try:
        yield
    finally:
        delattr(runner, method)


OPTIONS = {
    "async_scheduling": st.booleans(),
    "multi_step": st.sampled_from([1, 1, 3]),
    "enable_prefix_caching": st.sampled_from([True, True, True, False]),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "max_num_partial_prefills": st.integers(1, 2),
    "long_prefill_token_threshold": st.integers(0, 4),
}
# A token is computed in the time that its own and half another's bytes take to move.
WAYS = st.sampled_from(
    [
        {"preemption": "recompute"},
        {"preemption": "swap", "swap_space": 1.0},
        {"preemption": "swap", "swap_space": 1.0},
        {"preemption": "auto", "swap_space": 1.0, "swap_bandwidth": 1.0},
    ]
)


def scripted_next(seed, tokens):
    """The "model": a few tokens only, and any change of the prefix changes the rest."""
    number = sum((2 * i + 3) * token for i, token in enumerate(tokens)) * 2654435761
    number = (number + 97 * seed) % 2**32
    return EOS if number % 13 == 0 else 3 + (number >> 8) % 2


class ScriptedMachine(EngineMachine):
    """Tokens instead of K and V: an engine that mixes up slots shows in the tokens."""

    @initialize(
        num_slots=st.integers(8, 26),
        block_size=st.sampled_from([1, 2, 3]),
        max_num_seqs=st.integers(1, 5),
        spare=st.integers(0, 6),
        options=st.fixed_dictionaries(OPTIONS),
        way=WAYS,
        num_swap_blocks=st.sampled_from([2, 5, 30, 30]),
        seed=st.integers(0, 2),
        requests=st.lists(REQUESTS, min_size=1, max_size=4),
    )
    def begin(
        self,
        num_slots,
        block_size,
        max_num_seqs,
        spare,
        options,
        way,
        num_swap_blocks,
        seed,
        requests,
    ):
        self.seed = seed
        options |= way
        bytes_per_block = 8 * block_size  # of the scripted model
        if "swap_space" in way:
            options["swap_space"] = num_swap_blocks * bytes_per_block / 2**30
        if "swap_bandwidth" in way:
            options["swap_bandwidth"] = 24e-9
            options["prefill_rate"] = 1.0
        options |= {
            "num_blocks": 1 + num_slots // block_size,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + spare,
        }
        self.start(options, requests)

    def make_engine(self, **options):
        config = EngineConfig(max_model_len=24, debug_blocks=True, **options)
        next_token = functools.partial(scripted_next, self.seed)
        return scripted_engine(next_token, config, eos_token_ids=(EOS,))

    def predict(self, prompt, params):
        if isinstance(params, BeamSearchParams):
            return self.predict_beams(prompt, params)
        tokens = list(prompt)
        for _ in range(min(params.max_tokens, 24 - len(prompt))):
            tokens.append(scripted_next(self.seed, tokens))
            if tokens[-1] == EOS:
                break
        return [tokens[len(prompt) :]] * params.n

    def predict_beams(self, prompt, params):
        max_tokens = min(params.max_tokens, 24 - len(prompt))
        search = BeamSearch(params, frozenset([EOS]), max_tokens)
        beams = [list(prompt)]
        count = search.num_candidates
        logprobs = (-np.log(2) * np.arange(1, count + 1)).astype(np.float32).tolist()
        while beams:
            first = [scripted_next(self.seed, tokens) for tokens in beams]
            top_ids = [range(token, token + count) for token in first]
            continuations = search.advance(top_ids, [logprobs] * len(beams))
            beams = [[*beams[c.parent], c.token_id] for c in continuations]
        return [list(hypothesis.token_ids) for hypothesis in search.hypotheses]


class TinyModelMachine(EngineMachine):
    """The tiny model, with NaN wherever nothing is held."""

    model: TinyModel
    oracle: TinyModel  # with a cache of its own
    predicted: ClassVar = {}

    @initialize(
        num_blocks=st.integers(5, 10),
        max_num_batched_tokens=st.sampled_from([4, 8, 16]),
        options=st.fixed_dictionaries(OPTIONS),
        way=WAYS,
        num_swap_blocks=st.sampled_from([2, 5, 30, 30]),
        requests=st.lists(REQUESTS, min_size=1, max_size=4),
    )
    def begin(
        self,
        num_blocks,
        max_num_batched_tokens,
        options,
        way,
        num_swap_blocks,
        requests,
    ):
        options |= way
        bytes_per_block = CONFIG.block_size  # as conftest.py says
        if "swap_space" in way:
            options["swap_space"] = num_swap_blocks * bytes_per_block / 2**30
        if "swap_bandwidth" in way:
            options["swap_bandwidth"] = 3e-9
            options["prefill_rate"] = 1.0
        options |= {
            "num_blocks": num_blocks,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        self.start(options, requests)

    def make_engine(self, **options):
        return self.model.engine(**options)

    def predict(self, prompt, params):
        if isinstance(params, BeamSearchParams):
            return self.run_alone(prompt, params)[: params.beam_width]
        # Neither max_tokens nor n changes what comes before.
        most = dataclasses.replace(
            params, max_tokens=MAX_TOKENS, n=1 if params.is_greedy else 3
        )
        outputs = self.run_alone(prompt, most)[: params.n]
        return [tokens[: params.max_tokens] for tokens in outputs]

    def run_alone(self, prompt, params):
        key = (tuple(prompt), params)
        if key not in self.predicted:
            engine = self.oracle.engine(
                enable_prefix_caching=False, max_num_batched_tokens=16
            )
            (output,) = run_engine(engine, {"r": (prompt, params)}).values()
            self.predicted[key] = [list(c.token_ids) for c in output.outputs]
        return self.predicted[key]


def test_whatever_is_done_a_scripted_engine_gives_the_predicted_tokens():
    run_state_machine_as_test(
        ScriptedMachine, settings=settings_of(150, stateful_step_count=30)
    )
    assert ScriptedMachine.num_steps >= 10_000
    assert ScriptedMachine.num_preemptions > 100
    assert ScriptedMachine.num_hits > 1000
    assert ScriptedMachine.num_searches > 100
    assert ScriptedMachine.num_swapped_in_bytes > 1000


def use_model(model):
    TinyModelMachine.model = model
    TinyModelMachine.oracle = TinyModel()
    # Nothing need be compiled twice.
    TinyModelMachine.oracle.runner._executables = model.runner._executables


def test_whatever_is_done_the_tiny_model_gives_the_predicted_tokens(tiny):
    use_model(tiny)
    run_state_machine_as_test(
        TinyModelMachine, settings=settings_of(20, stateful_step_count=30)
    )
    assert TinyModelMachine.num_steps > 1000
    assert TinyModelMachine.num_preemptions > 100
    assert TinyModelMachine.num_hits > 100
    assert TinyModelMachine.num_searches > 10
    assert TinyModelMachine.num_swapped_in_bytes > 100
