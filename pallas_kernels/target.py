"""Which device a function is being compiled for, and whether the kernels know it."""

import re
from typing import Any

import jax

# AbstractDevice has no compute capability, only a name: H100, H200, H20, H800, GH200.
_HOPPER = re.compile(r"\bG?H\d{2,3}\b")


def target_device() -> Any:
    """Return the device that JAX compiles for: it has platform and device_kind.

    That of the mesh in use, if any, so that a program can be compiled for a device that
    is only described; otherwise the default device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def check_hopper() -> None:
    """Check that the kernels can run on the device that JAX compiles for.

    Raises:
        NotImplementedError: They cannot; the message names the device.
    """
    device = target_device()
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        is_hopper = _HOPPER.search(device.device_kind) is not None
    else:
        is_hopper = capability == "9.0"
    if device.platform not in ("gpu", "cuda") or not is_hopper:
        raise NotImplementedError(
            f"a device of kind {device.device_kind}: only NVIDIA Hopper GPUs"
        )
