"""Compiles the CPU kernels when the project is built or installed."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = {
    "amx": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma "
    "-mamx-tile -mamx-bf16",
    "avx512_bf16": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma",
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma",
    "avx2": "-mavx2 -mfma -mf16c",
}
COMMON_FLAGS = (
    "-std=c++20 -O3 -fPIC -shared -s -fvisibility=hidden -Wno-psabi "
    "-ffp-contract=fast -fno-math-errno -fno-trapping-math "
    "-static-libstdc++ -static-libgcc"
)
OPTIONAL = ("amx",)  # an older assembler may not know it
COMPILERS = ("g++", "g++-14", "g++-13", "g++-12", "clang++")  # of GCC 12 or newer


class CpuKernels(BuildHookInterface):
    """Adds `cpu_kernels/lib/*.so`; without a compiler jaxkv works, but slower."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile for every instruction set; called by hatchling.

        What was compiled before stays unless all that must be could be compiled anew.
        """
        is_supported = sys.platform == "linux" and platform.machine() == "x86_64"
        if self.target_name != "wheel" or not is_supported:
            return
        root = Path(self.root)
        named = os.environ.get("CXX")
        problems = []
        for compiler in [named] if named else filter(shutil.which, COMPILERS):
            try:
                missing = _compile_all(compiler, root)
            except (OSError, ImportError, subprocess.CalledProcessError) as error:
                problems.append(f"{compiler}: {error}")
                continue
            for problem in missing:
                self.app.display_warning(f"not compiled: {problem}")
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
            build_data["artifacts"].append("cpu_kernels/lib/*.so")
            return
        self.app.display_warning(
            "the CPU kernels were not compiled, so CPUs will be slower: "
            f"{'; '.join(problems) or 'no C++ compiler'}"
        )


def _compile_all(compiler: str, root: Path) -> list[str]:
    """Compile all libraries and put them in place; return what is wrong with others."""
    import jaxlib

    headers = Path(jaxlib.__file__).parent / "include"
    kernels = root / "cpu_kernels"
    source = kernels / "src" / "library.cc"
    missing = {}
    with tempfile.TemporaryDirectory(dir=kernels) as folder:
        for name, flags in FLAGS.items():
            library = Path(folder) / f"{name}.so"
            command = f"{compiler} {COMMON_FLAGS} {flags}".split()
            command += ["-isystem", str(headers), str(source), "-o", str(library)]
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError as error:
                if name not in OPTIONAL:
                    raise
                missing[name] = error
        (kernels / "lib").mkdir(exist_ok=True)
        for library in Path(folder).iterdir():
            library.replace(kernels / "lib" / library.name)
    for name in missing:  # one of an older source may still be there
        (kernels / "lib" / f"{name}.so").unlink(missing_ok=True)
    return [f"{name}: {error}" for name, error in missing.items()]
