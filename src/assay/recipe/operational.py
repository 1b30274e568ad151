"""The operational part of a recipe: how a run is executed, saved, watched and logged, and whom it trusts.

Recorded, and not part of the recipe's identity. It reads no file; `schema` puts these parts into the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from assay.errors import InputError
from assay.ledger.public import check_public
from assay.recipe.fields import (
    Amount,
    Cadence,
    Conflict,
    Count,
    Device,
    Keys,
    Part,
    Positive,
    RelativePath,
    Text,
    Tolerance,
    listed,
    refuse,
    short,
)

Recompute = bool | Literal["selective"]


def _recompute(value: object) -> object:
    if isinstance(value, bool) or value == "selective":
        return value
    raise refuse("runtime.recompute", short(value), "true, false or selective is expected")


class Runtime(Part):
    """How it is executed; recorded per segment. `recompute`: activations are computed again in the backward pass.

    With `selective` the results of matrix products and of attention are kept and the cheap rest is computed again.
    """

    compile: bool = False
    recompute: Annotated[Recompute, BeforeValidator(_recompute)] = False
    deterministic: bool = True
    engine: Literal["replicated", "fsdp"] = "replicated"
    device: Device | None = None


class Mirror(Part):
    """Copies off the node: `every` N-th full checkpoint, each read back (`readback`) or as the store reports it."""

    url: Text
    every: Count = 1
    verify: Literal["readback", "stored"] = "readback"
    keep: Amount = "all"


class Auto(Part):
    """What `checkpoint.every: auto` chooses from: hours between interruptions, or a trace of them; null: as observed.

    The choice lies between `least` and `most` updates.
    """

    interruption_hours: Positive | None = None
    trace: RelativePath | None = None
    least: Count = 1
    most: Count = 1000

    @model_validator(mode="after")
    def _fits(self) -> Auto:
        if self.least > self.most:
            raise refuse("checkpoint.auto.least", self.least, f"it must be at most checkpoint.auto.most ({self.most})")
        if self.interruption_hours is not None and self.trace is not None:
            raise refuse("checkpoint.auto.trace", self.trace, "checkpoint.auto.interruption_hours says it already")
        return self


class Checkpoint(Part):
    """When state is saved. `every`: full checkpoints; `auto` chooses by save time and interruptions (see `auto`).

    `keep` counts the passing full checkpoints; `extra` steps and slot ends stay. `weights_every`: weights
    alone, all of them kept. The final step is always saved.
    """

    every: Cadence = "auto"
    keep: Amount = 2
    weights_every: Count | None = None
    extra: Annotated[tuple[Count, ...], BeforeValidator(listed)] = ()
    slot_ends: bool = True
    mirror: Mirror | None = None
    auto: Auto | None = None

    @property
    def chosen_from(self) -> Auto:
        """What `every: auto` chooses from, also where the recipe leaves it to the defaults."""
        return self.auto or Auto()


class Evaluate(Part):
    """Validation during training, every N updates over `batches` micro-batches; null: none. `suite`: a file."""

    every: Count | None = None
    batches: Annotated[int, Field(ge=1, le=1 << 30)] = 20
    suite: RelativePath | None = None


class Control(Part):
    """The known computation before real training on a new allocation. `tolerance` is a decimal in quotes."""

    path: RelativePath | None = None
    required: bool = False
    tolerance: Tolerance = "0.001"

    @model_validator(mode="after")
    def _there(self) -> Control:
        if self.required and self.path is None:
            raise refuse("control.required", "true", "it needs control.path, the recorded control")
        return self


class Spikes(Part):
    """What happens at a loss spike. `none`: nothing. `skip`: the optimizer leaves out what is far too steep.

    That is an update whose gradient norm's logarithm lies `deviations` standard deviations above the mean over the
    last `window` updates that were not skipped; nothing is skipped before there are so many. After `most` in a row
    the next one stops the run (exit 5). Without `skip` these keys are null.
    """

    policy: Literal["none", "skip"] = "none"
    deviations: Positive | None = None  # skip: default 6
    window: Annotated[int, Field(ge=2, le=10_000)] | None = None  # skip: default 100
    most: Count | None = None  # skip: default 3

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: object) -> object:
        if isinstance(value, Mapping) and value.get("policy") == "skip":
            given = {key: inner for key, inner in value.items() if inner is not None}
            return {"deviations": 6.0, "window": 100, "most": 3} | given
        return value

    @model_validator(mode="after")
    def _fit(self) -> Spikes:
        for key in ("deviations", "window", "most"):
            if self.policy == "none" and getattr(self, key) is not None:
                raise refuse(f"spikes.{key}", getattr(self, key), "it belongs to policy skip, not none: remove it")
        return self

    @property
    def rule(self) -> tuple[float, int, int] | None:
        """(deviations, window, most) of the policy skip; None: nothing is skipped."""
        if self.deviations is None or self.window is None or self.most is None:
            return None
        return self.deviations, self.window, self.most


class Log(Part):
    """Metrics are written out every N lines. `norms_every`: updates between norms by group and noise; null: none."""

    every: Count = 10
    norms_every: Count | None = 100


class Trust(Part):
    """Public keys by role; who may approve, operate and publish."""

    reviewer: Keys = ()
    operator: Keys = ()
    publisher: Keys = ()

    @field_validator("reviewer", "operator", "publisher")
    @classmethod
    def _usable(cls, keys: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """A key that could never sign is refused here, not when the first approval is wanted."""
        try:
            return tuple(check_public(key, f"trust.{info.field_name}[{number}]") for number, key in enumerate(keys))
        except InputError as fault:
            raise Conflict(str(fault)) from None
