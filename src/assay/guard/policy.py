"""The policy: every key of the one YAML file that holds a team's rules about money and machines.

A `Policy` that exists is consistent; the recipe holds no money. Amounts are decimal strings in US dollars with the
unit in the key, never binary floats. It reads prices, spend and machines of nobody: other files of the room do.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationError, model_validator

from assay.errors import InputError
from assay.files.digest import canonical, digest
from assay.files.reading import read_text
from assay.recipe.fields import Conflict, Count, Name, Natural, Part, RelativePath, Text, listed, refuse
from assay.recipe.load import parse_yaml, sentence

LIMIT = 64 << 10  # bytes
Unit = Literal["machine-hour", "machine-second", "machine-month", "gpu-hour", "gpu-second", "gpu-month"]
Event = Literal["stop", "overspend", "stale_copy", "stalled", "failed_control", "no_reading"]
MOST_DIGITS = 28  # what decimal's default context carries
MOST = Decimal(10**12)  # dollars or their like: no amount is larger, so that every sum keeps its nano-dollars


def _decimal(value: object) -> object:
    """Decimals are given in quotes: YAML's numbers are binary floats, which hold no cents."""
    fault = ValueError('a decimal number of at least 0 in quotes is expected, such as "16.50"')
    if not isinstance(value, Decimal) and (not isinstance(value, str) or value != value.strip() or "_" in value):
        raise fault
    try:
        number = Decimal(value)
    except InvalidOperation:
        raise fault from None
    if not number.is_finite() or number < 0 or number.is_signed():
        raise fault
    if len(number.as_tuple().digits) > MOST_DIGITS or not -MOST_DIGITS < number.adjusted() < MOST_DIGITS:
        raise ValueError(f"a decimal number of at most {MOST_DIGITS} digits is expected")
    if number > MOST:
        raise ValueError(f"a decimal number of at most {MOST:,f} is expected")
    return number


def _above_zero(value: object) -> object:
    number = _decimal(value)
    if number == 0:
        raise ValueError('a decimal number above 0 in quotes is expected, such as "16.50"')
    return number


def _date(value: str) -> str:
    try:
        date.fromisoformat(value)
    except ValueError:
        raise ValueError('a date such as "2026-11-11" is expected, in quotes') from None
    return value


def _fraction(value: object) -> object:
    number = _above_zero(value)
    if isinstance(number, Decimal) and number > 1:
        raise ValueError('a decimal number above 0 and of at most 1 in quotes is expected, such as "0.9"')
    return number


_AsText = PlainSerializer(lambda value: format(value, "f"), return_type=str)
Money = Annotated[Decimal, BeforeValidator(_decimal), _AsText]  # at least 0
Price = Annotated[Decimal, BeforeValidator(_above_zero), _AsText]  # above 0
Fraction = Annotated[Decimal, BeforeValidator(_fraction), _AsText]  # above 0, at most 1
LONGEST = 10 * 365 * 24 * 3600  # seconds, ten years: beyond, calendars and timers end
Seconds = Annotated[int, Field(ge=1, le=LONGEST)]
SecondsFromZero = Annotated[int, Field(ge=0, le=LONGEST)]
Days = Annotated[int, Field(ge=0, le=LONGEST // 86_400)]
Words = Annotated[tuple[Text, ...], BeforeValidator(listed), Field(min_length=1)]


class Ceiling(Part):
    """The highest accepted price per 10^9 useful positions, over the trailing window."""

    usd_per_billion_positions: Price


class Resume(Part):
    """Hysteresis: back only after `readings` valid readings in a row at or below `fraction` × the ceiling."""

    fraction: Fraction = Decimal("0.9")
    readings: Count = 4


def _reserve(value: object) -> object:
    if isinstance(value, (dict, Reserve)) or value == "computed":
        return value
    raise ValueError('allowed are computed and an amount such as {usd: "25"}')


class Reserve(Part):
    """A reserve that is set rather than computed."""

    usd: Money


class Rate(Part):
    """What one unit of a currency is worth in US dollars, by whose word and of which day."""

    usd: Price
    source: Text
    date: Annotated[Text, AfterValidator(_date)]


class NoReading(Part):
    """What happens when no valid reading came for `after_seconds`: an alarm, or an alarm and a safe stop."""

    after_seconds: Seconds = 3600
    action: Literal["alarm", "stop"] = "alarm"


class Fixed(Part):
    """A price that stands in a contract; as a source it is always valid and never jumps."""

    value: Price
    unit: Unit
    currency: Text = "USD"


class CsvTrace(Part):
    """A trace with the columns `time, zone, available, usd_per_hour` (of the whole machine), one zone of it."""

    path: RelativePath
    zone: Text


class Command(Part):
    """A program that prints one JSON object on standard output; started without a shell."""

    argv: Words
    timeout_seconds: Seconds = 30


class SkypilotCatalogue(Part):
    """A CSV file of SkyPilot's catalogue; a catalogue price, never a live one."""

    path: RelativePath
    instance: Text
    region: Text | None = None
    zone: Text | None = None
    spot: bool = True


class Runpod(Part):
    """RunPod's HTTP API; the key is read from the environment variable `key_variable`, never from the file."""

    pod: Text | None = None  # what this pod costs now; null: the list price of `gpu`
    gpu: Text | None = None
    cloud: Literal["secure", "community"] = "secure"
    url: Text = "https://api.runpod.io"
    key_variable: Text = "RUNPOD_API_KEY"
    timeout_seconds: Seconds = 30

    @model_validator(mode="after")
    def _one(self) -> Runpod:
        _exactly_one(self, "a price source runpod", of=("pod", "gpu"))
        return self


class PriceSource(Part):
    """One place that prices come from: exactly one of its keys. The first of a policy's list leads, others confirm."""

    fixed: Fixed | None = None
    csv: CsvTrace | None = None
    command: Command | None = None
    skypilot: SkypilotCatalogue | None = None
    runpod: Runpod | None = None

    @model_validator(mode="after")
    def _one(self) -> PriceSource:
        _exactly_one(self, "a price source")
        return self


class Webhook(Part):
    """A POST of the alarm as JSON."""

    url: Text


class Mail(Part):
    """A mail through an SMTP server; name and password come from the environment, if the server asks for them."""

    server: Text
    sender: Text
    to: Words


class Alarm(Part):
    """Where an alarm goes, exactly one of three; `on` limits it to some events, without it all are sent."""

    webhook: Webhook | None = None
    command: Command | None = None
    mail: Mail | None = None
    on: Annotated[tuple[Event, ...], BeforeValidator(listed)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Alarm:
        _exactly_one(self, "an alarm", of=("webhook", "command", "mail"))
        return self


class DeadMan(Part):
    """The switch on the node: after so long without the guard's heartbeat it saves, and stops itself if `stop`."""

    after_seconds: Seconds = 1800
    stop: bool = False


class Argvs(Part):
    """Programs that list, stop and start the machine, started without a shell in the policy's folder.

    `list` prints one JSON object: `{"state": "running" | "stopped" | "gone", "usd_per_hour": "…" or null}`.
    """

    list: Words
    stop: Words
    start: Words | None = None
    timeout_seconds: Seconds = 120


class RunpodPod(Part):
    """A pod; `url` states it (API v2), `action_url` stops and starts it (the documented API v1)."""

    pod: Text
    url: Text = "https://api.runpod.io"
    action_url: Text = "https://rest.runpod.io"
    key_variable: Text = "RUNPOD_API_KEY"
    timeout_seconds: Seconds = 30


class SkypilotCluster(Part):
    """An unmanaged cluster, through the `sky` command (or what ASSAY_SKY names)."""

    cluster: Text
    timeout_seconds: Seconds = 600


class Through(Part):
    """How the guard reaches the machine: exactly one of its keys; see `guard.providers`."""

    local: bool | None = None  # true: the launcher and the trainer on this machine
    command: Argvs | None = None
    runpod: RunpodPod | None = None
    skypilot: SkypilotCluster | None = None

    @model_validator(mode="after")
    def _one(self) -> Through:
        _exactly_one(self, "machine.through")
        if self.local is False:
            raise refuse("machine.through.local", self.local, "true is expected, or another key")
        return self


class Machine(Part):
    """The machine as the provider sells it, and what its upkeep costs. Null: not known, and said so in reports."""

    gpus: Count
    provider: Name = "local"
    through: Through | None = None  # how the guard stops it; null: alarms alone, but for `provider: local`
    disk_gb: Natural | None = None
    disk_usd_per_gb_month_running: Money | None = None
    disk_usd_per_gb_month_stopped: Money | None = None
    egress_usd_per_gb: Money | None = None
    restart_seconds: SecondsFromZero = 900  # from a new allocation to its first update, paid for; an estimate
    save_seconds: SecondsFromZero = 10  # for one full checkpoint; an estimate
    positions_per_second: Count | None = None  # useful ones, of the whole machine; an estimate, for the simulator alone
    disk_days: Days = 7  # for how long the reserve pays the stopped machine's disk


class Zones(Part):
    """Which zone's machine is taken, and when a better one is moved to.

    A zone is taken when it has been available without a break for `settle_seconds`, and for so many
    `settle_seconds_per_loss` more as times it was lost within the last `memory_seconds`.
    """

    max_usd_per_hour: Price | None = None  # no machine above this price is taken
    settle_seconds: SecondsFromZero = 0
    settle_seconds_per_loss: SecondsFromZero = 0
    memory_seconds: Seconds = 86_400
    avoid_seconds: SecondsFromZero = 3600  # a zone that preempted us or failed control is not taken again for so long
    move_fraction: Fraction | None = None  # moves to a zone at or below this part of the present price; null: never


class Policy(Part):
    """The whole file. `ceiling` null: no ceiling. `cap_usd` null: funds alone limit what may be spent."""

    name: Name
    machine: Machine
    prices: Annotated[tuple[PriceSource, ...], BeforeValidator(listed)] = ()
    rates: dict[Text, Rate] = Field(default_factory=dict)  # by currency; without one its prices are no readings
    interval_seconds: Seconds = 300  # between two readings
    window_seconds: Seconds = 3600  # the trailing window of the price per useful position
    readings: Count = 4  # in a row above the ceiling before a stop
    ceiling: Ceiling | None = None
    resume: Resume = Field(default_factory=Resume)
    cap_usd: Money | None = None
    reserve: Annotated[Reserve | Literal["computed"], BeforeValidator(_reserve)] = "computed"
    stale_seconds: Seconds = 900  # a reading older than this is none
    jump_factor: Price = Decimal(3)  # a change beyond it, up or down, needs a second source
    no_reading: NoReading = Field(default_factory=NoReading)
    stalled_seconds: Seconds = 3600  # no new update for so long is an alarm
    copy_seconds: Seconds = 86_400  # a newest verified copy older than this is an alarm
    save_timeout_seconds: Seconds = 1800  # how long the guard waits for save and verified copy before it alarms
    zones: Zones = Field(default_factory=Zones)
    alarms: Annotated[tuple[Alarm, ...], BeforeValidator(listed)] = ()
    dead_man: DeadMan | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Policy:
        if self.jump_factor <= 1:
            raise refuse("jump_factor", self.jump_factor, "a factor above 1 is expected")
        if self.window_seconds < self.interval_seconds:
            raise refuse("window_seconds", self.window_seconds, "the window covers at least one interval_seconds of "
                         f"{self.interval_seconds}")  # fmt: skip
        if self.no_reading.after_seconds < self.interval_seconds:
            raise refuse("no_reading.after_seconds", self.no_reading.after_seconds, "at least one interval_seconds of "
                         f"{self.interval_seconds} is expected")  # fmt: skip
        return self


def load(path: Path) -> Policy:
    """The policy in a YAML file; InputError names the file, the key, the value and what is allowed."""
    return from_yaml(read_text(path, "a policy", LIMIT), str(path))


def from_yaml(text: str, where: str) -> Policy:
    """The policy in YAML text; `where` names it in messages."""
    return from_plain(parse_yaml(text, where), where)


def from_plain(value: object, where: str) -> Policy:
    """The policy in plain data, such as a receipt's body holds it."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: a policy is a mapping of keys; see policies/ for complete ones")
    try:
        return Policy.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {sentence(error, Policy)}") from None


def rate(usd: Decimal, source: str, day: str) -> Rate:
    """A rate that somebody states; InputError when it makes no sense."""
    try:
        return Rate.model_validate({"usd": usd, "source": source, "date": day})
    except ValidationError as error:
        raise InputError(f"the rate: {sentence(error, Rate)}") from None


def plain(policy: Policy) -> dict[str, Any]:
    """Every key with its value as plain JSON data; `from_plain` of it is the same policy."""
    return policy.model_dump(mode="json")


def policy_digest(policy: Policy) -> str:
    """SHA-256 of the RFC 8785 JSON of `plain`: what receipts name a policy by."""
    return digest(canonical(plain(policy)))


def _exactly_one(part: Part, noun: str, of: tuple[str, ...] = ()) -> None:
    names = of or tuple(type(part).model_fields)
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) != 1:
        what = " and ".join(given) if given else "none of its keys"
        raise Conflict(f"{noun} has {what}; give exactly one of {', '.join(names)}")
