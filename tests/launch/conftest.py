"""The runs that the tests of this folder copy; made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The project; nobody changes `whole`, `half` or the data."""
    return Runs(tmp_path_factory.mktemp("runs") / "project")


@pytest.fixture
def fresh(request: pytest.FixtureRequest, runs: Runs) -> Iterator[Callable[[str], Path]]:
    """Copies that are removed again; without an argument a new name."""
    made: list[Path] = []

    def copy(of: str) -> Path:
        made.append(runs.path / f"{request.node.name.replace('/', '-')}-{len(made)}")
        return runs.copy(of, made[-1].name) if of else made[-1]

    yield copy
    for path in made:
        shutil.rmtree(path, ignore_errors=True)
