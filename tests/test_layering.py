"""Who may import whom: the arrows of docs/architecture.md, read off the source."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "jaxkv",
    "pallas_kernels",
    "cpu_kernels",
    "convert",
    "benchmarks",
    "examples",
)
OURS = {*PACKAGES, "tests"}

# Of our own modules, what those under each name may import. The longest name that
# fits an importing module decides; a name allows everything under it.
ALLOWED = {
    "jaxkv": ("jaxkv",),
    "jaxkv.kv_format": (),
    "jaxkv.config": ("jaxkv.kv_format",),
    "jaxkv.host": ("jaxkv.config", "jaxkv.host"),
    "jaxkv.device": ("jaxkv.config", "jaxkv.kv_format", "jaxkv.device"),
    "jaxkv.device.attention": (
        "jaxkv.config",
        "jaxkv.kv_format",
        "jaxkv.device",
        "pallas_kernels",
        "cpu_kernels",
    ),
    "jaxkv.device.dense": ("pallas_kernels", "cpu_kernels"),
    "jaxkv.engine": (
        "jaxkv.config",
        "jaxkv.kv_format",
        "jaxkv.host",
        "jaxkv.device",
        "jaxkv.engine",
        "jaxkv.planner",
    ),
    "pallas_kernels": ("pallas_kernels",),
    "cpu_kernels": ("cpu_kernels",),
    "convert": ("jaxkv", "convert"),
    "benchmarks": ("jaxkv", "pallas_kernels", "cpu_kernels", "convert", "benchmarks"),
    "examples": ("jaxkv",),
}
# The command line imports the converters when the command is used, not before.
ALLOWED_INSIDE_FUNCTIONS = {"jaxkv.cli": ("convert",)}
# Of other people's modules, the host knows the standard library and numpy.
HOST_OUTSIDE = sys.stdlib_module_names | {"numpy"}


class Import(NamedTuple):
    module: str
    inside_function: bool
    line: int


def exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import of a module that lies in `package`, relative ones resolved."""

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, inside, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                child = f"{base}.{alias.name}"
                is_module = base.split(".")[0] in OURS and exists(child)
                yield Import(child if is_module else base, inside, node.lineno)
        else:
            functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            inside = inside or isinstance(node, functions)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def lies_under(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def rule_for(module: str) -> tuple[str, ...]:
    return ALLOWED[max((n for n in ALLOWED if lies_under(module, n)), key=len)]


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for imported in imports(source, package):
        top = imported.module.split(".")[0]
        allowed = rule_for(module)
        if imported.inside_function:
            allowed += ALLOWED_INSIDE_FUNCTIONS.get(module, ())
        if top in OURS:
            fine = any(lies_under(imported.module, name) for name in allowed)
        else:
            fine = not lies_under(module, "jaxkv.host") or top in HOST_OUTSIDE
        if not fine:
            found.append(f"{module}:{imported.line} imports {imported.module}")
    return found


def sources() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


@pytest.mark.parametrize(
    "path", sources(), ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_follow_the_arrows(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    assert violations(module, path.read_text(), is_package) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxkv.host.scheduler", "import jax"),
        ("jaxkv.host.scheduler", "def f():\n    import jax.numpy as jnp"),
        ("jaxkv.host.scheduler", "from jaxkv import device"),
        ("jaxkv.host.scheduler", "from jaxkv import LLM"),
        ("jaxkv.host.scheduler", "from ..engine import engine"),
        ("jaxkv.device.cache", "from jaxkv.host.block_pool import BlockPool"),
        ("jaxkv.device.cache", "import pallas_kernels"),
        ("jaxkv.device.cache", "from ..host import block_pool"),
        ("jaxkv.config", "from jaxkv.host import request"),
        ("jaxkv.engine.engine", "from pallas_kernels import attention"),
        ("jaxkv.engine.engine", "import convert.gguf"),
        ("jaxkv.cli", "import convert"),
        ("jaxkv.planner", "def f():\n    import convert"),
        ("pallas_kernels.decode", "from jaxkv.config import NULL_BLOCK"),
        ("jaxkv.testing", "from tests import helpers"),
        ("convert.hf", "import benchmarks.engine"),
    ],
)
def test_an_import_against_the_arrows_is_seen(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxkv.host.scheduler", "import heapq\nimport numpy as np"),
        ("jaxkv.host.scheduler", "from . import block_pool\nfrom jaxkv import config"),
        ("jaxkv.device.attention", "import jax\nfrom pallas_kernels import decode"),
        (
            "jaxkv.engine.engine",
            "from ..device import cache\nfrom ..host import request",
        ),
        ("jaxkv.cli", "def convert():\n    from convert import hf"),
        ("benchmarks.engine", "from jaxkv import LLM"),
    ],
)
def test_an_import_along_the_arrows_is_fine(module, source):
    assert violations(module, source) == []
