"""A signal at any moment of a command's own start: one sentence and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from small import Project

Assay = Callable[..., CompletedProcess[str]]


def signalled(folder: Path, module: str, number: signal.Signals) -> dict[str, str]:
    """An environment in which the signal reaches a command while it imports `module`, in text that is executed."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(f"import os\nexec('os.kill(os.getpid(), {int(number)})')\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["typer", "pydantic"])
def test_a_signal_while_train_is_imported_is_75_and_one_sentence(
    tmp_path: Path, assay: Assay, number: signal.Signals, module: str
) -> None:
    done = assay("train", "recipe.yaml", "--run", "run", env=signalled(tmp_path / "first", module, number))
    assert (done.returncode, done.stderr) == (75, "assay: interrupted before anything began\n")
    assert not (tmp_path / "run").exists()


def test_a_signal_in_what_train_does_before_its_ranks_is_75_too(project: Project, tmp_path: Path, assay: Assay) -> None:
    """Python ends a process by SIGINT where the interpreter saw a plain KeyboardInterrupt leave executed text."""
    words = ("train", project.recipe(), "--run", "run")
    done = assay(*words, env=signalled(tmp_path / "first", "mmap", signal.SIGINT))  # imported where a shard is opened
    assert done.returncode == 75, done
    assert done.stderr == "assay: stopped before training began; no update was made: start it again\n"
    assert not (tmp_path / "run").exists()


def test_other_commands_answer_alike_and_scripts_get_their_object(tmp_path: Path, assay: Assay) -> None:
    early = assay("status", "run", "--json", env=signalled(tmp_path / "first", "typer", signal.SIGINT))
    assert (early.returncode, early.stderr) == (75, "assay: interrupted before anything began\n")
    assert json.loads(early.stdout) == {"ok": False, "error": "interrupted before anything began", "exit": 75}
    late = assay("status", "run", "--json", env=signalled(tmp_path / "second", "pydantic", signal.SIGINT))
    assert (late.returncode, late.stderr) == (75, "assay: interrupted\n")
    assert json.loads(late.stdout) == {"ok": False, "error": "interrupted", "exit": 75}
