"""GGUF files: every number arrives in its place, and nothing is passed over."""

import contextlib
import math
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Quant
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from convert import gguf_file
from convert.gguf_file import llama3_scaling, open_gguf
from jaxkv.config import ModelConfig, RopeScaling
from jaxkv.device.llama import rope_frequencies
from tests.convert.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    TOKENS,
    VOCAB,
    tiny_tensors,
    write_gguf,
)

QUANTISED = (Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q4_K, Quant.Q6_K)
DTYPES = {
    Quant.F32: np.float32,
    Quant.F16: np.float16,
    Quant.BF16: ml_dtypes.bfloat16,
    **dict.fromkeys(QUANTISED, np.float32),
}
ALL_BIASES = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def open_error(path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        open_gguf(path)
    return str(caught.value)


def to_neighbour_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Hugging Face's q and k rows, in loops."""
    permuted = np.empty_like(rows)
    head_dim = len(rows) // num_heads
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            for half in range(2):
                source = head * head_dim + half * (head_dim // 2) + pair
                permuted[head * head_dim + 2 * pair + half] = rows[source]
    return permuted


# Numbers.


@pytest.mark.parametrize("quant", DTYPES, ids=lambda quant: quant.name)
def test_every_tensor_type_arrives_as_gguf_dequantises_it(path, quant, monkeypatch):
    monkeypatch.setattr(gguf_file, "ROWS_AT_ONCE", 100)
    stored = write_gguf(path, quant=quant)
    source = open_gguf(path)
    for ours, theirs in {
        "embed_tokens.weight": "token_embd.weight",
        "layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    }.items():
        expected = dequantize(stored[theirs], quant)
        ref = source.tensors[ours]
        loaded = ref.load()
        assert loaded.dtype == ref.dtype == DTYPES[quant]
        assert loaded.shape == ref.shape == expected.shape
        np.testing.assert_array_equal(loaded.astype(np.float32), expected)
        assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize("quant", DTYPES, ids=lambda quant: quant.name)
def test_quantised_query_rows_are_put_back_with_their_scales(path, quant):
    stored = write_gguf(path, quant=quant)
    loaded = open_gguf(path).tensors["layers.0.self_attn.q_proj.weight"].load()
    expected = dequantize(stored["blk.0.attn_q.weight"], quant)
    again = to_neighbour_order(loaded.astype(np.float32), HEADS)
    np.testing.assert_array_equal(again, expected)


def test_a_quantised_vector_is_dequantised_too(path):
    stored = write_gguf(path, quants={"output_norm.weight": Quant.Q8_0})
    expected = dequantize(stored["output_norm.weight"], Quant.Q8_0)
    loaded = open_gguf(path).tensors["norm.weight"].load()
    np.testing.assert_array_equal(loaded, expected)


def test_bfloat16_arrives_bit_exact(path):
    stored = write_gguf(path, quant=Quant.BF16)["blk.1.ffn_up.weight"]
    loaded = open_gguf(path).tensors["layers.1.mlp.up_proj.weight"].load()
    assert loaded.tobytes() == stored.tobytes()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_only_llamas_query_and_key_rows_are_reordered(path, architecture):
    biases = {"llama": ALL_BIASES, "qwen2": ("attn_q", "attn_k", "attn_v")}
    tensors = tiny_tensors(
        biases=biases.get(architecture, ()), qk_norm=architecture == "qwen3"
    )
    in_file = dict(tensors)
    if architecture == "llama":
        for name, tensor in tensors.items():
            if ".attn_q." in name:
                in_file[name] = to_neighbour_order(tensor, HEADS)
            elif ".attn_k." in name:
                in_file[name] = to_neighbour_order(tensor, KV_HEADS)
    write_gguf(path, in_file, architecture=architecture)
    refs = open_gguf(path).tensors.values()
    assert {ref.name for ref in refs} == set(tensors)
    for ref in refs:
        np.testing.assert_array_equal(ref.load(), tensors[ref.name], ref.name)


def test_opening_reads_no_tensor_and_loading_reads_one(path, monkeypatch):
    write_gguf(path)
    read = []
    fromfile = np.fromfile

    def spy(*args, **kwargs):
        read.append(kwargs["count"])
        return fromfile(*args, **kwargs)

    monkeypatch.setattr(np, "fromfile", spy)
    source = open_gguf(path)
    assert read == []
    source.tensors["norm.weight"].load()
    assert read == [HIDDEN * 4]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(path):
    write_gguf(path)
    source = open_gguf(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"changed while .* blk\.1\.ffn_down\.weight"):
        source.tensors["layers.1.mlp.down_proj.weight"].load()


# The config.


def test_the_config_is_what_the_metadata_says(path):
    write_gguf(path, tokenizer={"ggml.bos_token_id": 1, "ggml.eos_token_id": 2})
    assert open_gguf(path).config == ModelConfig(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_theta=50000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="float32",
    )


def test_an_output_matrix_unties_the_embeddings(path):
    write_gguf(path, tiny_tensors(tied=False))
    source = open_gguf(path)
    assert not source.config.tie_word_embeddings
    assert source.tensors["lm_head.weight"].name == "output.weight"


@pytest.mark.parametrize(
    ("architecture", "block", "expected"),
    [
        ("llama", {"biases": ("attn_q", "attn_k", "attn_v")}, "attention_bias"),
        ("llama", {"biases": ("attn_output",)}, "attention_output_bias"),
        ("llama", {"biases": ("ffn_gate", "ffn_up", "ffn_down")}, "mlp_bias"),
        ("qwen2", {"biases": ("attn_q", "attn_k", "attn_v")}, "attention_bias"),
        ("qwen3", {"qk_norm": True}, "qk_norm"),
    ],
)
def test_biases_and_norms_that_are_there_are_used(path, architecture, block, expected):
    write_gguf(path, tiny_tensors(**block), architecture=architecture)
    config = open_gguf(path).config
    flags = ("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm")
    assert [flag for flag in flags if getattr(config, flag)] == [expected]


@pytest.mark.parametrize(
    ("quant", "quants", "expected"),
    [
        (Quant.F32, {}, "float32"),
        (Quant.F16, {}, "float16"),
        (Quant.BF16, {}, "bfloat16"),
        (Quant.Q8_0, {}, "float32"),
        (Quant.BF16, {"token_embd.weight": Quant.F16}, "float32"),
        (Quant.F16, {"blk.1.ffn_up.weight": Quant.Q4_0}, "float32"),
    ],
)
def test_the_dtype_holds_every_matrix_exactly(path, quant, quants, expected):
    write_gguf(path, quant=quant, quants=quants)
    assert open_gguf(path).config.dtype == expected


def test_head_dim_is_the_key_length_where_it_is_given(path):
    tensors = tiny_tensors()
    keys = {"attention.head_count": 8, "attention.head_count_kv": 4}
    lengths = {f"attention.{which}_length": 32 for which in ("key", "value")}
    write_gguf(path, tensors, metadata={**keys, **lengths, "rope.dimension_count": 32})
    assert open_gguf(path).config.head_dim == 32
    wide = {f"attention.{which}_length": 128 for which in ("key", "value")}
    heads = {"attention.head_count": 2, "attention.head_count_kv": 1}
    write_gguf(path, tensors, metadata={**heads, **wide, "rope.dimension_count": None})
    assert open_gguf(path).config.head_dim == 128


def test_absent_keys_have_llama_cpps_defaults(path):
    tensors = tiny_tensors()
    for layer in range(LAYERS):
        for which in "kv":
            name = f"blk.{layer}.attn_{which}.weight"
            tensors[name] = np.zeros((HEADS * HEAD_DIM, HIDDEN), np.float32)
    absent = ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count")
    write_gguf(path, tensors, metadata=dict.fromkeys(absent))
    config = open_gguf(path).config
    assert (config.num_key_value_heads, config.rope_theta) == (HEADS, 10000.0)


# RoPE scaling.


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Divisors as Llama 3.1's paper code has them, frequency by frequency."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("head_dim", "factor"), [(128, 8.0), (64, 32.0)])
def test_rope_freqs_are_recognised_as_llama3_scaling(path, head_dim, factor):
    factors = llama3_factors(head_dim, 500000.0, factor)
    tensors = {**tiny_tensors(), "rope_freqs.weight": factors}
    heads = HIDDEN // head_dim
    metadata = {
        "rope.freq_base": 500000.0,
        "rope.dimension_count": head_dim,
        "attention.head_count": heads,
        "attention.head_count_kv": heads // 2,
    }
    write_gguf(path, tensors, metadata=metadata)
    source = open_gguf(path)
    assert source.config.rope_scaling == RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert "rope_freqs.weight" not in source.tensors
    plain = 500000.0 ** -(np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(
        rope_frequencies(source.config), plain / factors, rtol=1e-5
    )


def test_rope_freqs_of_ones_scale_nothing():
    assert llama3_scaling(np.ones(32, np.float32), 10000.0) is None


@pytest.mark.parametrize("index", [0, 14, 31])
def test_rope_freqs_that_are_not_llama3s_are_an_error(path, index):
    factors = llama3_factors(64, 500000.0, 32.0)
    factors[index] *= 1.01
    tensors = {**tiny_tensors(), "rope_freqs.weight": factors}
    write_gguf(path, tensors, metadata={"rope.freq_base": 500000.0})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3\.1's"):
        open_gguf(path)


def test_rope_freqs_beside_another_scaling_are_an_error(path):
    tensors = {**tiny_tensors(), "rope_freqs.weight": np.ones(32, np.float32)}
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    write_gguf(path, tensors, metadata=scaling)
    assert "beside a linear rope factor of 2" in open_error(path)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, 4.0),
        ({"factor": 4.0}, 4.0),
        ({"type": "linear"}, None),
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "none", "original_context_length": 4096}, None),
    ],
)
def test_linear_scaling_is_read(path, scaling, expected):
    write_gguf(path, metadata={f"rope.scaling.{key}": v for key, v in scaling.items()})
    wanted = expected and RopeScaling(rope_type="linear", factor=expected)
    assert open_gguf(path).config.rope_scaling == wanted


# Tokens.


def test_every_end_token_stops(path):
    ends = {"eos": 2, "eot": 5, "eom": 4}
    write_gguf(path, tokenizer={f"ggml.{k}_token_id": v for k, v in ends.items()})
    source = open_gguf(path)
    assert source.config.eos_token_ids == (2, 4, 5)
    assert source.generation_config == {"eos_token_id": [2, 4, 5]}


def test_template_and_special_tokens_are_kept(path):
    tokenizer = {
        "ggml.tokens": TOKENS,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "chat_template": "{{ messages }}",
    }
    write_gguf(path, tokenizer=tokenizer)
    source = open_gguf(path)
    assert source.tokenizer_json is None
    assert source.generation_config == {"bos_token_id": 1, "eos_token_id": [2]}
    assert source.tokenizer_config == {
        "bos_token": "t1",
        "eos_token": "t2",
        "chat_template": "{{ messages }}",
    }


# Everything is used, or an error.


def test_an_unknown_architecture_is_an_error(path):
    write_gguf(path, architecture="falcon")
    assert "architecture 'falcon' is unknown" in open_error(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.sliding_window", 4096),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("rope.scaling.yarn_ext_factor", 1.0),
        ("attention.causal", False),
        ("some.new_thing", "x"),
    ],
)
def test_metadata_that_changes_the_model_is_an_error(path, key, value):
    write_gguf(path, metadata={key: value})
    assert f"cannot honour: llama.{key} = {value!r}" in open_error(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 0),
        ("attention.sliding_window", 0),
        ("attention.causal", True),
        ("rope.scaling.finetuned", True),
        ("vocab_size", VOCAB),
        ("general.name", "Anything"),
    ],
)
def test_metadata_that_changes_nothing_is_accepted(path, key, value):
    write_gguf(path, metadata={key: value})
    open_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not"),
        ({"rope.dimension_count": 32}, "llama.rope.dimension_count is 32; only"),
        ({"attention.value_length": 32}, "llama.attention.value_length is 32; only"),
        ({"block_count": None}, "llama.block_count is missing"),
        ({"attention.layer_norm_rms_epsilon": None}, "rms_epsilon is missing"),
        ({"attention.head_count": [4, 2]}, "head_count differs between layers: [4, 2]"),
        ({"block_count": 10**9}, "block_count is 1000000000, but the file has only"),
        ({"context_length": 0}, "context_length must be a positive integer, got 0"),
        ({"rope.freq_base": "x"}, "llama.rope.freq_base must be a number, got 'x'"),
        ({"rope.freq_base": -1.0}, "model.gguf: rope_theta must be"),
        ({"rope.scaling.factor": -2.0}, "factor must be"),
        ({"rope.scaling.factor": float("inf")}, "factor must be a number, got inf"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, "epsilon must be >= 0, got -1.0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "a number, got nan"),
        ({"split.count": "two"}, "gguf: split.count must be an integer, got 'two'"),
        ({"general.type": "adapter"}, "holds no model but is of type 'adapter'"),
        ({"split.count": 3, "split.no": 1}, "is part 2 of a GGUF file split into 3"),
        ({"vocab_size": 13}, "token_embd.weight has shape [12, 256], the config asks"),
    ],
)
def test_metadata_that_does_not_fit_is_an_error(path, metadata, message):
    write_gguf(path, metadata=metadata)
    assert message in open_error(path)


def test_a_value_given_for_each_layer_may_be_the_same(path):
    write_gguf(path, metadata={"attention.head_count": [HEADS, HEADS]})
    assert open_gguf(path).config.num_attention_heads == HEADS


def test_a_tensor_that_has_no_place_is_an_error(path):
    extra = {"blk.0.attn_qkv.weight": np.zeros((4, HIDDEN), np.float32)}
    write_gguf(path, {**tiny_tensors(), **extra})
    assert "blk.0.attn_qkv.weight is not a tensor of this model" in open_error(path)


def test_missing_and_misshapen_tensors_are_an_error(path):
    tensors = tiny_tensors()
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_q.weight"] = np.zeros((2, HIDDEN), np.float32)
    write_gguf(path, tensors)
    message = open_error(path)
    assert "layers.1.mlp.up_proj.weight is missing" in message
    assert "blk.0.attn_q.weight has shape [2, 256]" in message


def test_qwen2_without_its_biases_is_an_error(path):
    write_gguf(path, architecture="qwen2")
    assert "layers.0.self_attn.q_proj.bias is missing" in open_error(path)


def test_a_tensor_type_that_is_not_supported_is_an_error(path):
    write_gguf(path, quants={"blk.1.ffn_down.weight": Quant.Q5_0})
    assert "tensor blk.1.ffn_down.weight has type Q5_0" in open_error(path)


# Broken files.


def test_a_file_cut_anywhere_is_an_error(path):
    write_gguf(path)
    whole = path.read_bytes()
    header = whole.index(b"output_norm.weight") + 3000
    for cut in [*range(header, 0, -37), *range(8), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:cut])
        expected = "is not a GGUF file" if cut < 4 else "is truncated"
        assert expected in open_error(path), cut


def test_the_message_for_a_cut_tensor_names_it_and_both_ends(path):
    write_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    message = open_error(path)
    last = list(tiny_tensors())[-1]
    assert f"tensor {last} ends at byte {len(whole)}" in message
    assert message.endswith(f"the file at byte {len(whole) - 100}")


def test_another_file_is_an_error(path):
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "is not a GGUF file: it starts with b'PK" in open_error(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (struct.pack("<I", 1), "is of GGUF version 1; known versions are (2, 3)"),
        (struct.pack("<I", 4), "is of GGUF version 4; known versions are (2, 3)"),
        (struct.pack(">I", 3), "is a big-endian GGUF file"),
    ],
)
def test_an_unknown_version_is_an_error(path, version, message):
    write_gguf(path)
    path.write_bytes(b"GGUF" + version + path.read_bytes()[8:])
    assert message in open_error(path)


@pytest.fixture(scope="module")
def damageable(tmp_path_factory):
    """A model, and the bytes of its header."""
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    tokenizer = {"ggml.tokens": TOKENS, "ggml.eos_token_id": 2, "chat_template": "{}"}
    write_gguf(path, metadata={"split.count": 1}, tokenizer=tokenizer)
    whole = path.read_bytes()
    return path, whole[: whole.index(b"blk.1.ffn_down.weight") + 60]


@given(st.floats(0, 1), st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_a_value_error_or_still_a_model(damageable, where, damage):
    path, header = damageable
    start = int(where * (len(header) - len(damage)))
    changed = header[:start] + damage + header[start + len(damage) :]
    with path.open("r+b") as file:
        file.write(changed)
    with contextlib.suppress(ValueError):
        open_gguf(path)
