"""The launch file: one YAML that names a recipe, its run folder and the machine, for `assay launch`.

A `Launch` that exists is consistent. It holds no learning choice (the recipe does), and no ceiling or budget (the
guard's policy does); the price here goes into the receipts of allocations and is judged by nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from assay.errors import InputError
from assay.files.reading import read_text
from assay.recipe.fields import Conflict, Count, Name, Natural, Part, Positive, RelativePath, Text, listed, refuse
from assay.recipe.load import parse_yaml, sentence

LIMIT = 64 << 10  # bytes
WHERE = ("local", "slurm", "skypilot")
_INFRA = re.compile(r"[a-z0-9-]+(/[A-Za-z0-9-]+){0,2}")
_ACCELERATORS = re.compile(r"[A-Za-z0-9-]+:[0-9]{1,2}")


def _price(value: str) -> str:
    try:
        number = Decimal(value)
    except InvalidOperation:
        number = Decimal(-1)
    if not number.is_finite() or number <= 0 or value != value.strip() or "_" in value:
        raise ValueError('a decimal number above 0 in quotes is expected, such as "16.50"')
    return value


def _infra(value: str) -> str:
    if not _INFRA.fullmatch(value):
        raise ValueError("cloud, cloud/region or cloud/region/zone is expected, such as gcp/us-central1/us-central1-a")
    return value


def _accelerators(value: str) -> str:
    if not _ACCELERATORS.fullmatch(value):
        raise ValueError("a kind and a count are expected, such as H100:8")
    return value


Price = Annotated[str, AfterValidator(_price)]
Lines = Annotated[tuple[Text, ...], BeforeValidator(listed)]
Infra = Annotated[tuple[Annotated[str, AfterValidator(_infra)], ...], BeforeValidator(listed), Field(min_length=1)]


class Restarts(Part):
    """How a run comes back: pauses, and when nobody tries any longer."""

    first_seconds: Positive = 5.0  # the first pause, doubled for each failure in a row
    longest_seconds: Positive = 600.0
    most: Natural = 20  # restarts in a row without a new checkpoint
    data_seconds: Natural = 3600  # how long a machine, which is paid for, waits for data
    cool_down_seconds: Natural = 3600  # how long a place that failed is not taken again


class Slurm(Part):
    """What sbatch is asked for: one node. `signal_seconds` before the limit the run saves and is queued again."""

    minutes: Count
    signal_seconds: Count = 180
    partition: Name | None = None
    account: Name | None = None
    qos: Name | None = None
    gpus: Text | None = None  # for --gpus-per-node, such as h100:8
    cpus: Count | None = None
    memory_gb: Count | None = None

    @model_validator(mode="after")
    def _in_time(self) -> Slurm:
        if self.signal_seconds >= self.minutes * 60:
            raise refuse("slurm.signal_seconds", self.signal_seconds, "less than slurm.minutes × 60 is expected")
        return self


class Skypilot(Part):
    """What SkyPilot is asked for: one unmanaged cluster of one machine, in the first of `infra` that can be had."""

    cluster: Name
    infra: Infra
    accelerators: Annotated[str, AfterValidator(_accelerators)]
    use_spot: bool = True
    disk_gb: Count = 256
    image: Text | None = None
    idle_minutes: Count = 30  # without a job SkyPilot stops the cluster and keeps its disk
    setup: Lines = ()  # commands that install Assay and bring the shards


class Launch(Part):
    """One run on one kind of machine. Null: not known, and never guessed."""

    recipe: RelativePath
    run: RelativePath
    on: Literal["local", "slurm", "skypilot"] = "local"
    ranks: Count = 1
    gpus: Natural | None = None
    provider: Name | None = None
    zone: Text | None = None
    machine: Text | None = None
    usd_per_machine_hour: Price | None = None
    restarts: Restarts = Restarts()
    slurm: Slurm | None = None
    skypilot: Skypilot | None = None

    @model_validator(mode="after")
    def _has_its_part(self) -> Launch:
        if self.on != "local" and getattr(self, self.on) is None:
            raise Conflict(f"on is {self.on}, but the key {self.on} is missing; say there what to ask for")
        return self


@dataclass(frozen=True)
class Task:
    """What `assay launch` was asked for: the launch, the file that said it (None: options did), recipe and run."""

    launch: Launch
    file: Path | None
    recipe: Path
    run: Path

    @property
    def project(self) -> Path:
        """The folder that the recipe's paths count from."""
        return self.recipe.resolve().parent if self.recipe.is_symlink() else self.recipe.parent


def load(path: Path, on: str | None = None) -> Task | None:
    """The task of a launch file, `on` in place of its own; None when the file is no launch file but a recipe.

    A launch file is told by its key `recipe`. InputError for every fault of the file or of a value.
    """
    value = parse_yaml(read_text(path, "a recipe or launch file", LIMIT * 4), str(path))
    if isinstance(value, Mapping) and "recipe" not in value and "model" in value:
        return None
    if not isinstance(value, Mapping):
        raise InputError(f"{path}: a recipe or launch file is a mapping of keys; see docs/operator.md")
    try:
        launch = Launch.model_validate(dict(value) | ({"on": on} if on else {}))
    except ValidationError as error:
        raise InputError(f"{path}: {sentence(error, Launch)}") from None
    return Task(launch, path, path.parent / launch.recipe, path.parent / launch.run)


def task(path: Path, on: str | None, run: Path | None, ranks: int | None) -> Task:
    """The task of a launch file, or of a recipe and options; InputError when neither says enough."""
    found = load(path, on)
    more = {} if ranks is None else {"ranks": ranks}
    if found is not None:
        if run is not None:
            raise InputError(f"{path} is a launch file, which names its run folder itself; leave --run away")
        return replace(found, launch=found.launch.model_copy(update=more))
    if on not in (None, "local"):
        raise InputError(f"{path} is a recipe, but --on {on} needs to know what to ask for; give a launch file")
    if run is None:
        raise InputError(f"{path} is a recipe, which names no run folder; give one with --run, or give a launch file")
    try:
        launch = Launch.model_validate({"recipe": path.name, "run": run.name, **more})
    except ValidationError as error:
        raise InputError(f"{path}: {sentence(error, Launch)}") from None
    return Task(launch, None, path, run)
