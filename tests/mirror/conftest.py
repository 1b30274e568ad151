"""A whole S3 on this machine behind a proxy with faults, and a small trained run whose every test gets a copy."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import Proxy
from mirror_runs import PIECE, Clock
from small import Project, drive

from assay.mirror.copying import Report, mirror
from assay.mirror.fetching import Fetched, fetch
from assay.run.folder import RunFolder

_numbers = itertools.count()


@pytest.fixture(scope="session")
def moto() -> Iterator[tuple[str, int]]:
    """Host and port of the server; it has the bucket `copies`."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as local:
        local.setenv("AWS_ACCESS_KEY_ID", "key")
        local.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
        boto3.client("s3", region_name="us-east-1", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="copies")
    yield host, port
    server.stop()


@pytest.fixture
def store(moto: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy, to which this process is sent."""
    with Proxy(*moto) as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def url() -> str:
    """An address that no other test uses."""
    return f"s3://copies/run-{next(_numbers)}"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run that stands at step 12 of 24: full checkpoints of steps 6 and 12, weights of 8."""
    project = Project(tmp_path_factory.mktemp("mirror") / "project")
    recipe = project.recipe(checkpoint__weights_every=8, checkpoint__slot_ends=False, evaluate__every=None)
    assert drive(recipe, project.path / "run", until="12") == 0
    return project.path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    """A copy of it."""
    return RunFolder(Path(shutil.copytree(trained, tmp_path / "project")) / "run")


@pytest.fixture
def clock() -> Clock:
    """A clock of its own."""
    return Clock()


@pytest.fixture
def copy(run: RunFolder, url: str, clock: Clock) -> Callable[..., Report]:
    """Mirror the run once, with small pieces."""

    def call(folder: RunFolder = run, address: str = url, **options: Any) -> Report:
        return mirror(folder, address, **{"once": True, "policy": clock.policy(), "piece": PIECE, **options})

    return call


@pytest.fixture
def bring(url: str, tmp_path: Path, clock: Clock) -> Callable[..., Fetched]:
    """Fetch into `back`."""

    def call(path: Path = tmp_path / "back", address: str = url, **options: Any) -> Fetched:
        return fetch(address, path, **{"policy": clock.policy(), **options})

    return call
