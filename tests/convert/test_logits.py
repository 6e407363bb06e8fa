"""Every family and option, converted and run: logits equal transformers'."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import convert_checkpoint
from jaxkv.device.llama import merge
from jaxkv.engine.checkpoint import load_config, load_params
from tests.helpers import FIXTURES

FOLDERS = sorted(path.name for path in (FIXTURES / "hf").iterdir())
CASES = [
    (folder, path.name)
    for folder in FOLDERS
    for path in sorted((FIXTURES / "hf" / folder).glob("config*.json"))
]


def convert(tmp_path, folder, config_name):
    """Convert a fixture, read with one of its configs; return the checkpoint."""
    source = tmp_path / "source"
    source.mkdir()
    for path in (FIXTURES / "hf" / folder).iterdir():
        if not path.name.startswith("config") and path.name != "expected.npz":
            shutil.copy(path, source)
    shutil.copy(FIXTURES / "hf" / folder / config_name, source / "config.json")
    convert_checkpoint(source, tmp_path / "checkpoint", progress=False)
    return tmp_path / "checkpoint"


def dense_attend(layer, q, k, v):
    """Causal softmax attention over one request, float32."""
    del layer
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones((1, *scores.shape[1:]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.einsum("hqk,khd->qhd", weights, v)


def run(params, config, token_ids, positions):
    model = merge(config, params)
    return model.logits(model(token_ids, positions, dense_attend))


@pytest.mark.parametrize(("folder", "config_name"), CASES, ids="/".join)
def test_logits_of_a_converted_checkpoint_equal_transformers(
    tmp_path, folder, config_name
):
    checkpoint = convert(tmp_path, folder, config_name)
    config = load_config(checkpoint)
    params = load_params(checkpoint, config, dtype="float32")
    config = type(config).from_json(config.to_json() | {"dtype": "float32"})
    expected = np.load(FIXTURES / "hf" / folder / "expected.npz")
    tolerance = max(1e-4, 5 * float(expected["float32_noise"]))
    call = jax.jit(run, static_argnums=1)
    length = expected["token_ids"].shape[1]
    positions = expected.get("position_ids", np.tile(np.arange(length), (2, 1)))
    for row in range(2):
        logits = call(
            params,
            config,
            jnp.asarray(expected["token_ids"][row], jnp.int32),
            jnp.asarray(positions[row], jnp.int32),
        )
        np.testing.assert_allclose(
            logits, expected["logits"][row], atol=tolerance, rtol=0
        )
    if "long_token_ids" in expected:
        tokens = jnp.asarray(expected["long_token_ids"][0], jnp.int32)
        logits = call(params, config, tokens, jnp.arange(len(tokens), dtype=jnp.int32))
        np.testing.assert_allclose(
            logits[-8:], expected["long_logits"][0], atol=tolerance, rtol=0
        )
