"""The rules of the house, read from the source: who may import whom, who stays light, how long a file may be."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import assay

ROOT = Path(assay.__file__).parent
# A room imports only rooms to its right; `cli` is the top. `errors` may be imported by all.
ORDER = ("cli", "release", "track", "guard", "launch", "mirror", "evaluate", "train", "checkpoint", "model", "corpus",
         "run", "plan", "data", "recipe", "ledger", "files")  # fmt: skip
HEAVY = {"torch", "safetensors", "transformers", "tokenizers"}
# Rooms, and files of other rooms, that never name a heavy library: not even inside a function.
LIGHT = ("files", "ledger", "recipe", "data", "plan", "run", "mirror", "guard", "launch", "track", "errors.py",
         "checkpoint/manifest.py", "checkpoint/tensors.py", "checkpoint/retention.py")  # fmt: skip
# These work with weights by their nature; whatever else lies in `release` stays light.
WITH_TORCH = ("release/export.py", "release/importing.py", "release/replay.py")
# The command's own files import nothing but typer and the standard library at their top.
AT_ONCE = {*sys.stdlib_module_names, "typer", "assay"}
SOURCES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imported(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Modules that a file imports; without `everywhere` those alone that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            if node.module == "assay" or str(node.module).startswith("assay."):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif everywhere or not _later(node):
            yield from imported(node, everywhere=everywhere)


def _later(node: ast.AST) -> bool:
    """What does not run when the file is imported."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def breaches(path: Path, tree: ast.AST) -> list[str]:
    """Rooms above its own that a file imports."""
    own = room(path)
    if own not in ORDER:
        return []
    allowed = {*ORDER[ORDER.index(own) :], "errors"}
    named = {name.split(".")[1] for name in imported(tree, everywhere=True) if name.startswith("assay.")}
    return sorted(name for name in named & set(ORDER) if name not in allowed)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_keeps_the_rules(path: Path) -> None:
    tree, name = parsed(path), path.relative_to(ROOT).as_posix()
    assert room(path) in {*ORDER, "errors.py", "__init__.py"}, f"{name} is in no room of the house"
    assert breaches(path, tree) == [], f"{name} imports a room above it"
    heavy = {one.split(".")[0] for one in imported(tree, everywhere=True)} & HEAVY
    if name.startswith(LIGHT) or (room(path) == "release" and name not in WITH_TORCH):
        assert not heavy, f"{name} names {heavy}"
    at_import = {one.split(".")[0] for one in imported(tree, everywhere=False)}
    if room(path) == "corpus":
        assert not at_import & {"torch", "transformers", "safetensors"}, f"{name} imports {at_import & HEAVY} at once"
    if room(path) == "cli":
        assert at_import <= AT_ONCE, f"{name} imports {at_import - AT_ONCE} at its top; assay --help would be slow"
        assert all(one.startswith(("assay.cli", "assay.errors", "assay.__version__")) or not one.startswith("assay.")
                   for one in imported(tree, everywhere=False)), f"{name} imports a room at its top"  # fmt: skip
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 700, f"{name} is too long; split it"
    if path.stat().st_size:
        assert ast.get_docstring(tree), f"{name} says nowhere what it is"


def test_the_walk_sees_a_breach_wherever_it_hides() -> None:
    """The rules above are worth nothing if the walk misses an import."""
    for text in (
        "from assay.train import loop", "import assay.train.loop", "from assay import train",
        "def f() -> None:\n    from assay.train.loop import train", "try:\n    import assay.train\nexcept E:\n    pass",
        "class A:\n    def f(self) -> None:\n        if x:\n            import assay.cli.main",
    ):  # fmt: skip
        assert breaches(ROOT / "run" / "folder.py", ast.parse(text)), text
    assert not breaches(ROOT / "train" / "loop.py", ast.parse("from assay.run import folder\nimport assay.errors"))
    assert list(imported(ast.parse("def f():\n    import torch"), everywhere=True)) == ["torch"]
    assert list(imported(ast.parse("def f():\n    import torch"), everywhere=False)) == []
