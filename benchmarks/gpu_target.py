"""Compiles for an H200 on a machine without a GPU.

jax's CUDA plugin compiles for a device that is only described. Without NVIDIA's
libraries it can run nothing, and jax would complain of it at every start. So it lies
in a folder of its own, outside the environment that everything else uses, and only
the process that `call` starts sees that folder. `make test-gpu-compile` fills it.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROOT = Path(__file__).parent.parent
FOLDER = Path(sys.prefix) / "gpu-compile"
PLUGIN = "jax-cuda13-plugin"

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
}
"""


def call(function: Callable, **arguments):
    """Run a module's function in a process that can `compile_for_h200`.

    Args:
        function: Importable by its module's name.
        **arguments: Its keyword arguments; they and the result go through JSON.

    Raises:
        RuntimeError: The plugin is missing or of another version than jaxlib, or the
            function raised; its traceback is in the message.
    """
    check_plugin(metadata.version("jaxlib"), [str(FOLDER), *sys.path])
    python_path = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(python_path),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Executables of a described device cannot be read back.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    name = f"{function.__module__}:{function.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_target", name, json.dumps(arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-8000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check_plugin(wanted: str, path: list[str]) -> None:
    """Check that the CUDA plugin on `path` is there and of the wanted version."""
    found = next(
        (x.version for x in metadata.distributions(name=PLUGIN, path=path)), None
    )
    if found != wanted:
        raise RuntimeError(
            f"compiling for an H200 needs {PLUGIN} {wanted}, as jaxlib is, and found "
            f"{found}: remove {FOLDER}*; `make test-gpu-compile` installs it there"
        )


def compile_for_h200(
    function: Callable,
    *args,
    donate_argnums: tuple[int, ...] = (),
    compiler_options: dict[str, Any] | None = None,
):
    """Compile a function for one H200; only in a process that `call` started.

    Args:
        function: Not jitted.
        *args: Pytrees of arrays or of `jax.ShapeDtypeStruct`; only their shapes and
            dtypes matter.
        donate_argnums: As for `jax.jit`.
        compiler_options: Likewise.

    Returns:
        A `jax.stages.Compiled` that can be looked at and not run.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H200, topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(function, donate_argnums=donate_argnums).trace(*abstract)
        lowered = traced.lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=compiler_options)


if __name__ == "__main__":
    module_name, _, function_name = sys.argv[1].partition(":")
    called = getattr(importlib.import_module(module_name), function_name)
    print(json.dumps(called(**json.loads(sys.argv[2]))))
