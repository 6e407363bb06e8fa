"""What storing K and V in fewer bits does to a model's predictions.

    python -m benchmarks.quality CHECKPOINT --output build/quality

A text runs through the model in windows, once with a float32 cache and once with each
format, and each position's distribution over the next token is compared. Then prompts
cut from the text are continued greedily by an engine with each format, and the tokens
are counted that are those of a float32 cache. Everything but the cache is float32; on
a GPU only with JAX_DEFAULT_MATMUL_PRECISION=highest.

A format is FORMAT or K:V, then +rotation and +skip=LAYER,... as wanted:
`int4_asymmetric:int8+rotation+skip=0`. The text is a novel that pip fetches; the first
--context tokens of a window are not predicted. `equal tokens` are those before the
first that differs, of --max-tokens. One JSON line a format goes to stdout, then a
table; --output writes both and a plot into a folder.
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tqdm

from benchmarks import quality_report, quality_scores, quality_text, quality_windows
from benchmarks.quality_setting import DEFAULT_SETTINGS, REFERENCE, Setting
from benchmarks.quality_windows import Windows
from jaxkv import SamplingParams
from jaxkv.config import ModelConfig
from jaxkv.device.llama import Params
from jaxkv.engine.checkpoint import load_config, load_params, load_tokenizer
from jaxkv.engine.engine import Engine

_PROMPT_TOKENS_A_STEP = 16


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        config: The model's, in float32.
        settings: How K and V are stored.
        windows: What is predicted.
        prompts: What is continued.
        sampling_params: How.
    """

    config: ModelConfig
    settings: list[Setting]
    windows: Windows
    prompts: list[list[int]]
    sampling_params: SamplingParams

    @property
    def num_generated(self) -> int:
        """Tokens of all prompts and of what is generated after them."""
        max_tokens = self.sampling_params.max_tokens or 0
        return sum(len(prompt) + max_tokens for prompt in self.prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, the reference's included."""
        once = self.windows.token_ids.size + self.num_generated
        return once * (1 + len(self.settings))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the formats that the command line names."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        plan = make_plan(arguments)
    except ValueError as error:
        parser.error(str(error))
    params = load_params(arguments.checkpoint, plan.config, dtype="float32")
    shared = _shared_fields(arguments, plan)
    records = []
    for setting, figures in zip(plan.settings, measure(plan, params), strict=True):
        records.append(_setting_fields(setting, plan.config) | figures | shared)
        print(json.dumps(records[-1]), flush=True)
    print(f"\n{quality_report.table(records)}", flush=True)
    if arguments.output is not None:
        for remark in quality_report.write(records, arguments.output):
            print(remark, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a folder that `jaxkv convert` wrote")
    parser.add_argument("--formats", nargs="+", default=DEFAULT_SETTINGS)
    parser.add_argument("--tokens", type=int, default=21_504, help="(%(default)s)")
    parser.add_argument("--window", type=int, default=1024, help="(%(default)s)")
    parser.add_argument("--context", type=int, default=32, help="(%(default)s)")
    parser.add_argument(
        "--prompts", type=int, default=16, help="0: nothing is generated (%(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="another one, UTF-8")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    return parser


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Cut the text into what is run.

    Raises:
        ValueError: A number, a format or a file is wrong.
    """
    checkpoint = Path(arguments.checkpoint)
    config = dataclasses.replace(load_config(checkpoint), dtype="float32")
    settings = [Setting.parse(text) for text in arguments.formats]
    for setting in settings:
        setting.cache_config(config, num_blocks=2)
    longest = max(arguments.window, arguments.prompt_tokens + arguments.max_tokens)
    most = config.max_position_embeddings
    if longest > most:
        raise ValueError(f"{longest} tokens are more than the model's {most}")
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise ValueError(f"{checkpoint} has no tokenizer")
    path = arguments.text or quality_text.fetch(checkpoint.resolve().parent)
    token_ids = tokenizer.encode(quality_text.read(path), add_special_tokens=False)
    return Plan(
        config=config,
        settings=settings,
        windows=quality_windows.cut(
            token_ids,
            tokens=arguments.tokens,
            window=arguments.window,
            context=arguments.context,
        ),
        prompts=cut_prompts(token_ids, arguments.prompts, arguments.prompt_tokens),
        sampling_params=SamplingParams(
            max_tokens=arguments.max_tokens, temperature=0.0, ignore_eos=True
        ),
    )


def measure(plan: Plan, params: Params) -> Iterator[dict[str, Any]]:
    """Yield each setting's figures."""
    with tqdm.tqdm(total=plan.num_tokens, unit="tok", unit_scale=True) as bar:
        bar.set_description("windows")
        all_scores, reference_nll = quality_windows.score_windows(
            params, plan.config, plan.settings, plan.windows, bar.update
        )

        def continuations(setting: Setting) -> list[list[int]]:
            bar.set_description(str(setting))
            generated = greedy(
                params, plan.config, setting, plan.prompts, plan.sampling_params
            )
            bar.update(plan.num_generated)
            return generated

        expected = continuations(Setting(REFERENCE))
        for setting, scores in zip(plan.settings, all_scores, strict=True):
            agreed = agreement(continuations(setting), expected)
            yield quality_scores.summarize(scores, reference_nll) | agreed


def _setting_fields(setting: Setting, config: ModelConfig) -> dict[str, Any]:
    cache_config = setting.cache_config(config, num_blocks=2)
    return {
        "benchmark": "quality",
        "setting": str(setting),
        "formats": setting.formats,
        **dataclasses.asdict(setting),
        "bytes_per_token": cache_config.bytes_per_token,
    }


def _shared_fields(arguments: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    return {
        "model": Path(arguments.checkpoint).name,
        "text": quality_text.NAME if arguments.text is None else arguments.text.name,
        "windows": len(plan.windows.token_ids),
        "window": arguments.window,
        "context": arguments.context,
        "scored": plan.windows.num_scored,
        "prompts": len(plan.prompts),
        "prompt_tokens": arguments.prompt_tokens,
        "max_tokens": arguments.max_tokens,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def cut_prompts(
    token_ids: Sequence[int], num_prompts: int, prompt_tokens: int
) -> list[list[int]]:
    """Cut prompts from a text, at even distances.

    Raises:
        ValueError: The numbers are wrong, or prompts would overlap.
    """
    if num_prompts < 0 or prompt_tokens < 1:
        raise ValueError(
            f"prompts {num_prompts} must be >= 0, prompt_tokens {prompt_tokens} >= 1"
        )
    distance = len(token_ids) // max(num_prompts, 1)
    if distance < prompt_tokens:
        raise ValueError(
            f"{num_prompts} prompts of {prompt_tokens} tokens overlap in "
            f"{len(token_ids)} tokens"
        )
    begins = range(0, num_prompts * distance, distance)
    return [list(token_ids[begin : begin + prompt_tokens]) for begin in begins]


def greedy(
    params: Params,
    config: ModelConfig,
    setting: Setting,
    prompts: Sequence[list[int]],
    sampling_params: SamplingParams,
) -> list[list[int]]:
    """Return the greedy continuation of each prompt, by an engine of its own.

    All prompts run side by side, a few tokens of each in a step, so that they end
    together and two buckets are all that is compiled.
    """
    if not prompts:
        return []
    num_rows = len(prompts)
    max_model_len = max(map(len, prompts)) + (sampling_params.max_tokens or 0)
    blocks_per_row = -(-max_model_len // quality_windows.BLOCK_SIZE)
    engine = Engine.from_params(
        params,
        config,
        setting.engine_config(
            block_size=quality_windows.BLOCK_SIZE,
            num_blocks=1 + num_rows * blocks_per_row,
            max_model_len=max_model_len,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * _PROMPT_TOKENS_A_STEP,
            max_num_partial_prefills=num_rows,
            long_prefill_token_threshold=_PROMPT_TOKENS_A_STEP,
            enable_prefix_caching=False,
            warmup="lazy",
        ),
    )
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, sampling_params)
    generated = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            generated[output.request_id] = list(output.outputs[0].token_ids)
    return [generated[str(index)] for index in range(len(prompts))]


def agreement(
    generated: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Count, for each prompt, the tokens before the first that differs.

    Returns:
        {agreeing, agreeing_mean, agreeing_median}; the latter are None without prompts.
    """
    agreeing = [
        quality_scores.num_agreeing(tokens, wanted)
        for tokens, wanted in zip(generated, expected, strict=True)
    ]
    return {
        "agreeing": agreeing,
        "agreeing_mean": statistics.mean(agreeing) if agreeing else None,
        "agreeing_median": statistics.median(agreeing) if agreeing else None,
    }


if __name__ == "__main__":
    main()
