"""The recipe: every key of the contract's YAML, its type, its default and what is allowed.

A `Recipe` that exists is consistent: heads divide the width, the decay is at least one update, the
start is explicit. It reads no file and knows nothing of the data's content; `load.py` does the reading.

Keys from `name` to `seed` are learning choices; those after it are operational (see `operational`).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    model_serializer,
    model_validator,
)

from assay.recipe.fields import (
    BelowOne,
    Count,
    Digest,
    Name,
    Natural,
    NotNegative,
    Part,
    Positive,
    RelativePath,
    Updates,
    listed,
    refuse,
    short,
)
from assay.recipe.operational import Checkpoint, Control, Evaluate, Log, Runtime, Spikes, Trust


class InitFrom(Part):
    """Weights and config of a model: the optimizer is fresh, the step 0. `sha256`: digest of the weights file."""

    path: RelativePath
    sha256: Digest | None = None


class ContinueFrom(Part):
    """Another run's full state. `sha256`: the `state_sha256` of the checkpoint's manifest; `step`: its step."""

    path: RelativePath
    step: Count
    sha256: Digest | None = None


class Start(Part):
    """How a run begins; in YAML `scratch`, `{init_from: …}` or `{continue_from: …}`. Never chosen silently."""

    init_from: InitFrom | None = None
    continue_from: ContinueFrom | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: object) -> object:
        if value == "scratch":
            return {}
        if isinstance(value, Start):
            return value
        allowed = "allowed are scratch, {init_from: {path, sha256}} and {continue_from: {path, step, sha256}}"
        if not isinstance(value, Mapping):
            raise refuse("start", short(value), allowed)
        given = [key for key in ("init_from", "continue_from") if value.get(key) is not None]
        if len(given) != 1 and all(key in ("init_from", "continue_from") for key in value):
            raise refuse("start", "{" + ", ".join(given) + "}", allowed)
        return value

    @model_serializer
    def _as_written(self) -> str | dict[str, Any]:
        if self.init_from is not None:
            return {"init_from": self.init_from.model_dump(mode="json")}
        if self.continue_from is not None:
            return {"continue_from": self.continue_from.model_dump(mode="json")}
        return "scratch"

    @property
    def kind(self) -> Literal["scratch", "init-from", "continue-from"]:
        """The glossary's word for this start."""
        if self.init_from is not None:
            return "init-from"
        return "scratch" if self.continue_from is None else "continue-from"

    @property
    def first_update(self) -> int:
        """The first update that this run does itself."""
        return 0 if self.continue_from is None else self.continue_from.step


class Pins(Part):
    """Expected digests that pre-flight compares before training; null: not pinned, and pre-flight says so.

    `weights`, `config`: the files of an `init_from` start. `tokenizer`: what the queue's header names.
    `validation`: `tokens.bin` of the validation shard. `code`: the training source. `queue_prefix`: one line
    of the queue, the last one at the time of approval; later appends keep it.
    """

    weights: Digest | None = None
    config: Digest | None = None
    tokenizer: Digest | None = None
    validation: Digest | None = None
    code: Digest | None = None
    queue_prefix: Digest | None = None


class Model(Part):
    """The decoder's shape. `ffn` is always the resolved size; YAML may give `ffn_multiple` in its place."""

    layers: Annotated[int, Field(ge=1, le=10_000)]
    width: Annotated[int, Field(ge=2, le=1 << 20)]
    heads: Annotated[int, Field(ge=1, le=1 << 16)]
    kv_heads: Annotated[int, Field(ge=1, le=1 << 16)]  # default: heads
    vocabulary: Annotated[int, Field(ge=2, le=1 << 32)]
    block: Annotated[int, Field(ge=1, le=1 << 26)]
    ffn: Annotated[int, Field(ge=1, le=1 << 24)]
    norm_eps: Positive = 1e-6
    rope_theta: Positive = 10_000.0
    qk_norm: bool = False
    value_residual: bool = False
    attention_bias: bool = False
    logit_cap: NotNegative = 0.0  # 0: none
    tie_embeddings: bool = True
    document_mask: bool = False

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        given = dict(value)
        if given.get("kv_heads") is None and "heads" in given:
            given["kv_heads"] = given["heads"]
        multiple = given.pop("ffn_multiple", None)
        if (multiple is None) == (given.get("ffn") is None):
            state = "missing" if multiple is None else f"{short(given['ffn'])} beside ffn_multiple {short(multiple)}"
            raise refuse("model.ffn", state, "exactly one of ffn and ffn_multiple is expected")
        if multiple is None:
            return given
        width = given.get("width")
        if type(multiple) not in (int, float) or not 0 < multiple <= 1000:
            raise refuse("model.ffn_multiple", short(multiple), "a number above 0 and of at most 1000 is expected")
        if type(width) is int and 1 <= width <= 1 << 20:
            given["ffn"] = int(multiple * width)
        else:
            given["ffn"] = 1  # the fault of `width` is the one to report
        return given

    @model_validator(mode="after")
    def _fit(self) -> Model:
        if self.width % self.heads:
            raise refuse("model.heads", self.heads, f"heads must divide model.width ({self.width})")
        if self.head_size % 2:
            raise refuse(
                "model.heads",
                self.heads,
                f"the head size model.width / model.heads ({self.head_size}) must be even for rotary positions",
            )
        if self.heads % self.kv_heads:
            raise refuse("model.kv_heads", self.kv_heads, f"kv_heads must divide model.heads ({self.heads})")
        return self

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.width // self.heads


class Data(Part):
    """Which data. Only `seed` is identity; the paths say where the approved bytes lie on this machine."""

    queue: RelativePath
    roots: Annotated[tuple[RelativePath, ...], BeforeValidator(listed)] = ()  # empty: the queue's own folder
    validation: RelativePath | None = None
    seed: Natural
    when_missing: Literal["stop", "wait"] = "stop"


class Batch(Part):
    """Sequences per update: micro × accumulation × lanes, whatever the ranks."""

    micro: Annotated[int, Field(ge=1, le=1 << 20)]
    accumulation: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    lanes: Annotated[int, Field(ge=1, le=1 << 16)] = 1

    @model_validator(mode="after")
    def _power(self) -> Batch:
        if self.lanes & (self.lanes - 1):
            raise refuse("batch.lanes", self.lanes, "lanes must be a power of two (1, 2, 4, 8, …)")
        return self

    @property
    def global_batch(self) -> int:
        """Sequences in one update."""
        return self.micro * self.accumulation * self.lanes

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """The numbers of ranks that may run this batch with a canonical reduction: the divisors of `lanes`."""
        return tuple(1 << power for power in range(self.lanes.bit_length()))


MUONS = ("muon", "normuon")  # kinds that treat the blocks' matrices by Muon
_MUON_DEFAULTS: dict[str, object] = {
    "muon_lr": 0.02,
    "muon_momentum": 0.95,
    "muon_steps": 5,
    "muon_dtype": "auto",
}


class Optimizer(Part):
    """AdamW for all, or Muon for the matrices and AdamW for the rest. Without Muon its keys are null.

    `normuon` is Muon with a second moment for each row of its directions (Li et al. 2025, arXiv:2510.05491).
    """

    kind: Literal["muon", "normuon", "adamw"]
    lr: Positive
    muon_lr: Positive | None = None
    muon_momentum: BelowOne | None = None
    muon_steps: Annotated[int, Field(ge=1, le=100)] | None = None
    muon_dtype: Literal["auto", "bfloat16", "float32"] | None = None  # auto: bfloat16 on GPUs, float32 on the CPU
    weight_decay: NotNegative = 0.1
    betas: Annotated[tuple[BelowOne, BelowOne], BeforeValidator(listed)] = (0.9, 0.95)
    eps: Positive = 1e-8
    grad_clip: Positive | None = 1.0  # null: no clipping

    @model_validator(mode="before")
    @classmethod
    def _muon_keys(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        given = dict(value)
        if given.get("kind") in MUONS:
            for key, default in _MUON_DEFAULTS.items():
                if given.get(key) is None:
                    given[key] = default
        elif given.get("kind") == "adamw":
            for key in _MUON_DEFAULTS:
                if given.get(key) is not None:
                    raise refuse(
                        f"optimizer.{key}",
                        short(given[key]),
                        "it has a meaning only with optimizer.kind muon or normuon: remove it",
                    )
        return given


class ScheduleKind(StrEnum):
    """The shapes of the learning rate; the formulas are in `schedule.py`."""

    WSD = "wsd"
    CONSTANT = "constant"
    COSINE = "cosine"


class Schedule(Part):
    """The learning rate over the updates. `updates` is the scheduled number, not a stop point or an estimate.

    `decay: none` is a WSD schedule whose decay was removed; `decay_fraction` or `decay_start` may stay
    beside it without effect, so that a later amendment can bring the decay back.
    """

    kind: Annotated[ScheduleKind, BeforeValidator(lambda value: _kind(value))]
    updates: Updates
    warmup: Natural = 0
    decay_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    decay_start: Natural | None = None
    decay: Literal["none", "linear", "cosine", "1-sqrt"] | None = None  # wsd: default linear; else null
    min_lr: NotNegative = 0.0
    rewarm: Natural = 0
    intent: Literal["no-decay"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_decay(cls, value: object) -> object:
        if isinstance(value, Mapping) and value.get("kind") == "wsd" and value.get("decay") is None:
            return {**value, "decay": "linear"}
        return value

    @model_validator(mode="after")
    def _fit(self) -> Schedule:
        if self.warmup >= self.updates:
            raise refuse("schedule.warmup", self.warmup, f"it must be below schedule.updates ({self.updates})")
        if self.kind is not ScheduleKind.WSD:
            for key in ("decay", "decay_fraction", "decay_start", "intent"):
                value = getattr(self, key)
                if value is not None:
                    raise refuse(f"schedule.{key}", value, f"it belongs to kind wsd, not {self.kind}: remove it")
            return self
        if self.decay_fraction is not None and self.decay_start is not None:
            raise refuse(
                "schedule.decay_start",
                self.decay_start,
                "decay_fraction is given too: exactly one of the two is expected",
            )
        if self.decay == "none":
            return self
        if self.decay_fraction is None and self.decay_start is None:
            raise refuse(
                "schedule.decay", self.decay, "it needs decay_fraction or decay_start; decay: none is the one without"
            )
        start = self.decay_at
        assert start is not None
        if start >= self.updates and self.decay_fraction is not None:
            raise refuse(
                "schedule.decay_fraction",
                self.decay_fraction,
                f"of {self.updates} updates it leaves a decay shorter than one update; enlarge it or set decay: none",
            )
        if start >= self.updates:
            raise refuse("schedule.decay_start", start, f"it must be below schedule.updates ({self.updates})")
        if start < self.warmup:
            key = "decay_fraction" if self.decay_start is None else "decay_start"
            raise refuse(
                f"schedule.{key}",
                getattr(self, key),
                f"the decay would start at update {start}, inside the warm-up of {self.warmup} updates",
            )
        return self

    @property
    def decay_at(self) -> int | None:
        """D, the first update of the decay: T − floor(fraction × T) in decimal arithmetic; null: no decay."""
        if self.kind is not ScheduleKind.WSD or self.decay == "none":
            return None
        if self.decay_start is not None:
            return self.decay_start
        assert self.decay_fraction is not None
        return self.updates - int(Decimal(repr(self.decay_fraction)) * self.updates)


class Loss(Part):
    """`chunk`: positions whose logits exist at one time. `z`: weight of mean(logsumexp²); 0: none."""

    chunk: Annotated[int, Field(ge=1, le=1 << 30)] = 1024
    z: NotNegative = 0.0


class Precision(Part):
    """The arithmetic. Stored token ids have their own dtype in the shard."""

    compute: Literal["float32", "bfloat16"] = "float32"
    master: Literal["float32"] = "float32"


class Recipe(Part):
    """Every choice of a run. Learning keys first, operational keys after `seed`."""

    name: Name
    start: Start
    pins: Pins = Pins()
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule
    loss: Loss = Loss()
    precision: Precision = Precision()
    reduction: Literal["canonical", "fast"] = "canonical"
    seed: Natural
    runtime: Runtime = Runtime()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    control: Control = Control()
    spikes: Spikes = Spikes()
    log: Log = Log()
    trust: Trust = Trust()

    @model_validator(mode="after")
    def _fit(self) -> Recipe:
        schedule, first = self.schedule, self.start.first_update
        if schedule.min_lr > self.optimizer.lr:
            raise refuse("schedule.min_lr", schedule.min_lr, f"it may be optimizer.lr ({self.optimizer.lr}) at most")
        if first >= schedule.updates:
            raise refuse(
                "start.continue_from.step", first, f"nothing is left to do: schedule.updates is {schedule.updates}"
            )
        if schedule.rewarm and self.start.kind == "scratch":
            raise refuse("schedule.rewarm", schedule.rewarm, "it is allowed only after init_from or continue_from")
        if schedule.rewarm > schedule.updates - first:
            raise refuse(
                "schedule.rewarm", schedule.rewarm, f"this run does only {schedule.updates - first} updates itself"
            )
        for step in self.checkpoint.extra:
            if not first < step <= schedule.updates:
                raise refuse("checkpoint.extra", step, f"this run's steps go from {first + 1} to {schedule.updates}")
        if len(set(self.checkpoint.extra)) != len(self.checkpoint.extra):
            raise refuse("checkpoint.extra", list(self.checkpoint.extra), "a step is named twice")
        if self.evaluate.every is not None and self.data.validation is None:
            raise refuse("evaluate.every", self.evaluate.every, "it needs data.validation, the shard to validate on")
        return self

    @property
    def global_batch(self) -> int:
        """Sequences in one update."""
        return self.batch.global_batch

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """The numbers of ranks that may run this recipe: divisors of the lanes, with `fast` of the micro-batches."""
        if self.reduction == "canonical":
            return self.batch.rank_counts
        micro_batches = self.batch.accumulation * self.batch.lanes
        # More ranks than a thousand micro-batches would need are nobody's machine; a plan shows each number.
        return tuple(count for count in range(1, min(micro_batches, 1024) + 1) if micro_batches % count == 0)

    @property
    def positions_per_update(self) -> int:
        """Trained-on targets in one update: global batch × block."""
        return self.batch.global_batch * self.model.block


def keys_at(place: tuple[str | int, ...], whole: type[BaseModel] | None = None) -> tuple[str, ...]:
    """The keys that are allowed at a place of the recipe (or of `whole`), such as `("model",)`; empty: none are."""
    part: type[BaseModel] | None = whole or Recipe
    for step in place:
        if isinstance(step, int):  # an item of a list: the list's annotation has led to its part already
            continue
        assert part is not None
        field = part.model_fields.get(step)
        part = None if field is None else _part_of(field.annotation)
        if part is None:
            return ()
    assert part is not None
    return (*part.model_fields, "ffn_multiple") if part is Model else tuple(part.model_fields)


def _part_of(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((part for choice in get_args(annotation) if (part := _part_of(choice)) is not None), None)


def _kind(value: object) -> object:
    if isinstance(value, ScheduleKind):
        return value
    names = [kind.value for kind in ScheduleKind]
    if value not in names:
        raise ValueError(f"allowed are {', '.join(names)}")
    return ScheduleKind(str(value))
