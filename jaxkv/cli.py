"""The command line: `jaxkv generate | convert | export | info`.

Errors are one sentence on stderr and exit status 1; nothing shows a traceback.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv.kv_format import KV_FORMATS, has_static_scale

GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(f"jaxkv {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"jaxkv {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxkv", description="A paged KV cache for JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_convert(commands)
    _add_export(commands)
    _add_info(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer prompts with a converted checkpoint",
        description="Answer prompts with a converted checkpoint, all of them at once; "
        "answers are printed in the order of the prompts, as they are generated.",
    )
    parser.add_argument("checkpoint", help="a folder that `jaxkv convert` wrote")
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; may be given several times (default: lines of standard input)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt in the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=128, help="tokens to generate (%(default)s)"
    )
    sampling.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)"
    )
    sampling.add_argument("--top-k", type=int, default=0, help="0 is off (%(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="(%(default)s)")
    sampling.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="1 is off (%(default)s)"
    )
    sampling.add_argument("--seed", type=int, help="makes a drawn answer repeatable")
    sampling.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer at this text; may be given several times",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the arithmetic (auto: the checkpoint's)",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="FORMAT",
        help="of stored K and V, or K:V: auto (the arithmetic's), "
        f"{', '.join(KV_FORMATS)}",
    )
    engine.add_argument(
        "--kv-cache-rotation",
        action="store_true",
        help="rotate K and V that are stored in 4 bits",
    )
    engine.add_argument(
        "--kv-cache-skip-layers",
        type=_layers,
        default=(),
        metavar="LAYER[,LAYER...]",
        help="layers whose K and V keep the arithmetic's dtype",
    )
    engine.add_argument("--num-blocks", type=int, help="blocks in the KV pool")
    engine.add_argument("--block-size", type=int, default=16, help="(%(default)s)")
    engine.add_argument("--max-model-len", type=int, help="longest request, in tokens")
    engine.add_argument("--max-num-seqs", type=int, default=64, help="(%(default)s)")
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        help="most tokens of a step (%(default)s)",
    )
    engine.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="dispatch each step before the last one's tokens are known",
    )
    engine.add_argument(
        "--multi-step",
        type=int,
        default=1,
        help="decoding steps that run as one (%(default)s)",
    )
    parser.add_argument(
        "--stats", action="store_true", help="say afterwards what the cache did"
    )
    parser.set_defaults(run=_generate)


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a Hugging Face folder or a GGUF file",
        description="Convert a Hugging Face folder (safetensors) or a GGUF file to a "
        "checkpoint: config.json, params/ (Orbax) and the tokenizer.",
    )
    parser.add_argument("src", help="a Hugging Face folder or a .gguf file")
    parser.add_argument("dst", help="the folder to write")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the parameters (auto: the source's; float32 for quantised GGUF)",
    )
    _add_copy_options(parser)
    parser.set_defaults(run=_convert)


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint back as a Hugging Face folder",
        description="Write a converted checkpoint back as a Hugging Face folder.",
    )
    parser.add_argument("src", help="a folder that `jaxkv convert` wrote")
    parser.add_argument("dst", help="the folder to write")
    _add_copy_options(parser)
    parser.set_defaults(run=_export)


def _add_copy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier result at DST"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="say what is in a checkpoint",
        description="Say what is in a converted checkpoint, and what its KV cache "
        "costs.",
    )
    parser.add_argument("checkpoint", help="a folder that `jaxkv convert` wrote")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=_info)


def _layers(text: str) -> tuple[int, ...]:
    """Read layer indices with commas between them."""
    return tuple(int(part) for part in text.split(","))


def _convert(arguments: argparse.Namespace) -> None:
    _keep_off_accelerators()
    from convert import convert_checkpoint
    from jaxkv.engine.checkpoint import load_config

    convert_checkpoint(
        arguments.src,
        arguments.dst,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        progress=not arguments.quiet,
    )
    config = load_config(arguments.dst)
    scales = f", with {_describe_kv_scales(config)}" if config.kv_scales else ""
    print(f"wrote {arguments.dst}{scales}")


def _describe_kv_scales(config: Any) -> str:
    """Say how many layers have calibrated KV scales, and how large these are."""
    pairs = [pair for pair in config.kv_scales if pair is not None]
    if not pairs:
        return "no calibrated KV scales"
    ranges = [
        f"{name} {min(values):.3g} to {max(values):.3g}"
        for name, values in zip(("K", "V"), zip(*pairs, strict=True), strict=True)
    ]
    return (
        f"calibrated KV scales for {len(pairs)} of {config.num_hidden_layers} layers "
        f"({', '.join(ranges)})"
    )


def _keep_off_accelerators() -> None:
    """Leave a GPU alone: converting needs none, and JAX would claim its memory."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _export(arguments: argparse.Namespace) -> None:
    _keep_off_accelerators()
    from convert import export_checkpoint

    export_checkpoint(
        arguments.src,
        arguments.dst,
        overwrite=arguments.overwrite,
        progress=not arguments.quiet,
    )
    print(f"wrote {arguments.dst}")


def _info(arguments: argparse.Namespace) -> None:
    from jaxkv.config import CacheConfig
    from jaxkv.device.llama import param_shapes
    from jaxkv.engine.checkpoint import load_config, load_tokenizer, stored_params

    config = load_config(arguments.checkpoint)
    stored_params(arguments.checkpoint, config)  # they are there, and fit the config
    tokenizer = load_tokenizer(arguments.checkpoint)
    num_params = sum(math.prod(shape) for shape in param_shapes(config).values())
    element = 4 if config.dtype == "float32" else 2

    def bytes_per_token(name: str) -> int:
        return CacheConfig(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_blocks=2,
            kv_cache_dtype=name,
            kv_scales=config.kv_scales,
        ).bytes_per_token

    facts = {
        **config.to_json(),
        "parameters": num_params,
        "parameter_bytes": num_params * element,
        "tokenizer_token_ids": tokenizer.num_token_ids if tokenizer else None,
        "chat_template": bool(tokenizer and tokenizer.chat_template),
        "kv_bytes_per_token": {
            name: bytes_per_token(name)
            for name in KV_FORMATS
            if not has_static_scale(name) or all(config.kv_scales or [None])
        },
    }
    if arguments.json:
        print(json.dumps(facts))
        return
    per_token = facts["kv_bytes_per_token"]
    print(f"{arguments.checkpoint}: {config.model_type}, {num_params:,} parameters")
    print(f"  {config.dtype}, {facts['parameter_bytes'] / GIB:.2f} GiB")
    for field in dataclasses.fields(config):
        if field.name not in ("model_type", "dtype", "kv_scales"):
            print(f"  {field.name}: {getattr(config, field.name)}")
    print(f"  {_describe_kv_scales(config)}")
    print(f"  tokenizer: {facts['tokenizer_token_ids'] or 'none'} token ids")
    print(f"  chat template: {'yes' if facts['chat_template'] else 'no'}")
    for name, size in per_token.items():
        print(
            f"  KV cache in {name}: {size:,} bytes a token, {size * 16:,} a block of "
            f"16, {GIB // size:,} tokens a GiB"
        )


def _generate(arguments: argparse.Namespace) -> None:
    from jaxkv.engine.llm import LLM
    from jaxkv.host.request import SamplingParams

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
    )
    if arguments.system is not None and not arguments.chat:
        raise ValueError("--system needs --chat")
    texts = arguments.prompt or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise ValueError("no prompts: give --prompt, or lines on standard input")
    if not Path(arguments.checkpoint).is_dir():
        raise ValueError(f"{arguments.checkpoint} is not a folder")
    print(f"loading {arguments.checkpoint}", file=sys.stderr)
    llm = LLM(
        arguments.checkpoint,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        kv_cache_rotation=arguments.kv_cache_rotation,
        kv_cache_skip_layers=arguments.kv_cache_skip_layers,
        num_blocks=arguments.num_blocks,
        block_size=arguments.block_size,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        async_scheduling=arguments.async_scheduling,
        multi_step=arguments.multi_step,
        warmup="lazy",
    )
    prompts: list[Any] = list(texts)
    if arguments.chat:
        system = [] if arguments.system is None else [arguments.system]
        prompts = [
            llm.encode_chat(
                [{"role": "system", "content": text} for text in system]
                + [{"role": "user", "content": text}]
            )
            for text in texts
        ]
    print("generating; each kind of step is compiled on first use", file=sys.stderr)
    report = _print_streams(llm, texts, prompts, params)
    if arguments.stats:
        print(report)


def _print_streams(llm: Any, texts: list[str], prompts: list[Any], params: Any) -> str:
    """Print every answer as it grows, one after another, and return a report.

    All run at once; the first unfinished one is shown live, and what the others have
    made meanwhile follows when their turn comes.
    """
    answers: dict[int, Any] = {}
    shown = 0  # answers printed to their end
    printed = 0  # characters printed of the next one
    start = time.perf_counter()
    for output in llm.stream(prompts, params):
        answers[int(output.request_id.rpartition("-")[2])] = output
        while shown in answers:
            answer = answers[shown]
            if printed == 0:
                print(f"> {texts[shown]}", flush=True)
            text = answer.outputs[0].text
            print(text[printed:], end="", flush=True)
            printed = max(len(text), 1)
            if not answer.finished:
                break
            print("\n", flush=True)
            shown, printed = shown + 1, 0
    return _report(llm, answers, time.perf_counter() - start)


def _report(llm: Any, answers: dict, seconds: float) -> str:
    """Say what the cache did and what contiguous allocation would have taken."""
    engine = llm.engine
    stats, per_token = engine.stats(), engine.limits.kv_bytes_per_token
    outputs = answers.values()
    running_seconds = seconds - stats.compile_seconds
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    new_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    used = stats.peak_held_blocks * engine.config.block_size * per_token
    running = min(len(answers), engine.config.max_num_seqs)
    contiguous = running * engine.limits.max_model_len * per_token
    mib = 2**20
    return "\n".join(
        (
            f"{len(answers)} requests, {prompt_tokens} prompt tokens, {new_tokens} "
            f"generated in {running_seconds:.1f} s: {new_tokens / running_seconds:.1f} "
            f"tokens/s ({stats.num_preemptions} preemptions), after "
            f"{stats.compile_seconds:.1f} s of compiling "
            f"{stats.num_compilations} steps",
            f"KV cache: at most {stats.peak_held_blocks} of {stats.total_blocks} "
            f"blocks held, {used / mib:.1f} MiB ({per_token:,} bytes a token)",
            f"Contiguous allocation of {engine.limits.max_model_len} tokens for each "
            f"of {running} requests: {contiguous / mib:.1f} MiB, "
            f"{contiguous / max(used, 1):.0f} times as much",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
