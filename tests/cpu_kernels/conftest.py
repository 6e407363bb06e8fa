import pytest

import cpu_kernels


@pytest.fixture(params=cpu_kernels.INSTRUCTION_SETS)
def instruction_set(request):
    """Each of them that this machine can run."""
    if request.param not in cpu_kernels.supported_instruction_sets():
        pytest.skip(f"{request.param}: not of this machine, or not compiled")
    return request.param
