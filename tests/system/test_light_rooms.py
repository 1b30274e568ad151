"""The light rooms and commands work where PyTorch and its neighbours cannot be imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import assay

WITHOUT = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
REFUSED = {"torch", "safetensors", "transformers", "tokenizers"}
sys.meta_path.insert(0, Refuse())
"""

EVERYTHING = (
    WITHOUT
    + """
import importlib, json, os, sys
root = sys.argv[1]
rooms = "files ledger recipe data plan run launch release corpus cli mirror guard track".split()
heavy = {"release.export", "release.importing", "release.replay"}
modules = []
for room in rooms:
    folder = os.path.join(root, room)
    if os.path.isdir(folder):
        for name in sorted(os.listdir(folder)):
            if name.endswith(".py") and name != "__init__.py" and f"{room}.{name[:-3]}" not in heavy:
                modules.append(f"assay.{room}.{name[:-3]}")
modules += ["assay.checkpoint.manifest", "assay.checkpoint.tensors", "assay.checkpoint.retention"]
for name in modules:
    importlib.import_module(name)

import contextlib, io
from assay.cli.main import main
results = {}
for words in json.loads(sys.argv[2]):
    sys.argv = ["assay", *words]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
    results[" ".join(words)] = [code, out.getvalue()[-2000:], err.getvalue()[-2000:]]
assert not REFUSED & set(sys.modules), sorted(REFUSED & set(sys.modules))
print(json.dumps({"modules": len(modules), "results": results}))
"""
)

HELP = """
import sys
sys.argv = ["assay", "--help"]
from assay.cli.main import main
try:
    main()
except SystemExit as left:
    assert not left.code, left.code
slow = {"pydantic", "numpy", "rich", "torch", "ruamel", "transformers", "safetensors", "tokenizers", "rfc8785"}
print("slow:", sorted(slow & {name.split(".")[0] for name in sys.modules}))
"""


def python(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, sound_project: Path) -> Path:
    """A copy, since the commands write into the run."""
    return Path(shutil.copytree(sound_project, tmp_path_factory.mktemp("light") / "project"))


def test_light_rooms_and_commands_work_without_torch(project: Path) -> None:
    works = [
        ["--help"], ["plan", "recipe.yaml", "--json"], ["status", "run", "--json"], ["verify", "run", "--json"],
        ["preflight", "recipe.yaml", "--run", "new", "--json"], ["data", "inspect", "data/train-0", "--json"],
        ["data", "verify", "data/queue.jsonl", "--json"],
        ["data", "order", "data/queue.jsonl", "--seed", "7", "--slot", "0"],
        ["data", "batches", "data/queue.jsonl", "--seed", "7", "--global-batch", "8", "--expect", "expected.json"],
        ["data", "exposure", "run", "--json"], ["stop", "run"], ["release", "run"],
        ["bundle", "run", "bundle", "--json"], ["verify", "bundle", "--json"],
    ]  # fmt: skip
    needs = [["evaluate", "run"], ["export", "run", "out"], ["import", "hf", "hf", "out"]]
    done = python(EVERYTHING, str(Path(assay.__file__).parent), json.dumps(works + needs), cwd=project)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["modules"] > 45
    for words in works:
        code, out, err = told["results"][" ".join(words)]
        assert code == 0, (words, out, err)
    for words in needs:
        code, out, err = told["results"][" ".join(words)]
        assert code == 2, (words, out, err)
        assert "pip install 'assay[train]'" in err, "the missing extra is named"
        assert "Traceback" not in err
    assert not (project / "out").exists()


def test_help_imports_nothing_slow(tmp_path: Path) -> None:
    done = python(HELP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("slow: []\n"), done.stdout[-300:]
    assert "train" in done.stdout
