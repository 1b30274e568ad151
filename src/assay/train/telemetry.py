"""The line of an update in metrics.jsonl: what the ranks told each other, norms by group, noise, speed, MFU.

Also its comparison with the line that it supersedes, and the receipt of a straggler. Everything that comes from a
device rode on the one word between the ranks; nothing here waits for one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from assay.errors import InputError
from assay.ledger.ledger import now
from assay.plan.figures import flops_per_position, mfu
from assay.recipe.schema import Recipe
from assay.run import metrics as lines
from assay.run.folder import RunFolder
from assay.run.speed import busy
from assay.train import numerics
from assay.train.agreement import Agreed
from assay.train.optimizers import joined_norm, tensor_norms
from assay.train.reduction import Exchange
from assay.train.sharding import ShardedExchange
from assay.train.trainer import Trainer
from assay.train.validation import Validation

# Two segments that promise other bits than each other still agree about a loss to this many nats.
LOSS_TOLERANCE = 0.00005


def due_norms(recipe: Recipe, update: int) -> bool:
    """Whether norms by group and the gradient's noise are measured at this update."""
    return recipe.log.norms_every is not None and update % recipe.log.norms_every == 0


@torch.no_grad()
def values(exchange: Exchange | ShardedExchange) -> Tensor:
    """This rank's part of the word at such an update: the norm of every weight that it owns, then its lanes' squares.

    The weights are those before the update. Float64; as long on every rank.
    """
    norms = tensor_norms({name: weight.detach() for name, weight in exchange.owned.parameters.items()})
    squares = exchange.lane_squares()
    absent = squares[0].new_zeros(())
    return torch.stack([*(norms.get(name, absent) for name in sorted(exchange.owner)), *squares])


def group_of(name: str) -> str:
    """The group of a tensor: embedding, head, attention, ffn, norms, biases or value_residual."""
    if name.startswith(("embedding.", "head.")):
        return name.partition(".")[0]
    if name.endswith(".bias"):
        return "biases"
    if "norm.weight" in name:
        return "norms"
    if name.endswith(".value_residual"):
        return "value_residual"
    return name.split(".")[2]  # of a block: attention or ffn


def by_group(norms: Mapping[str, float]) -> dict[str, float]:
    """The norm of each group of tensors from the norms of the tensors."""
    groups: dict[str, dict[str, float]] = {}
    for name, norm in norms.items():
        groups.setdefault(group_of(name), {})[name] = norm
    return {group: joined_norm(some) for group, some in sorted(groups.items())}


def noise(squares: list[float], whole: float, positions: int) -> dict[str, float | None] | None:
    """The simple noise scale, from an update's lanes (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).

    `squares` are the lanes' squared norms as they enter the sum, `whole` is the norm of the sum, `positions` those of
    all lanes. With G the true gradient: `signal` estimates |G|², `noise` the trace of the covariance of one position's
    gradient, both without bias, and `scale` is noise ÷ signal, in positions; None where the estimated signal is not
    positive. One update tells little: average signal and noise over many, then divide. None with one lane.
    """
    lanes = len(squares)
    if lanes < 2:
        return None
    big, small = whole * whole, lanes * math.fsum(squares)  # a lane's own mean is `lanes` times its share of the sum
    signal = (lanes * big - small) / (lanes - 1)
    trace = (small - big) * positions / (lanes - 1)
    return {"signal": signal, "noise": trace, "scale": trace / signal if signal > 0 else None}


def line_of(
    trainer: Trainer,
    update: int,
    loss: float,
    z_loss: float,
    told: Agreed,
    rate: dict[str, float],
    seconds: float,
    validation: Validation | None,
    skipped: bool = False,
) -> dict[str, Any]:
    """One line, with everything that is known when the update's host work is done."""
    recipe, meters = trainer.recipe, trainer.meters
    peak, used = numerics.memory(trainer.device)
    speed = recipe.positions_per_update / seconds if seconds else None
    line: dict[str, Any] = {
        "update": update,
        "segment": trainer.segment,
        "time": now(),
        "loss": loss,
        "lr": rate.get("lr"),
        "muon_lr": rate.get("muon_lr"),
        "grad_norm": told.grad_norm,
        "seconds": seconds,
        "tokens_per_second": speed,
        **_mfu(trainer),
        "parts": {name: round(value, 6) for name, value in meters.parts.items()},
        "memory_peak": max((one for one in (peak, meters.memory) if one is not None), default=None),
        "memory_used": used,
        "power_watts": meters.watts,
        "energy_joules": meters.joules,
        "order_digest": trainer.started.position.order_digest,
    }
    if update in trainer.superseded:
        line["recomputed"] = True
    if recipe.loss.z:
        line["z_loss"] = recipe.loss.z * z_loss
    if skipped:
        line["skipped"] = True
    if due_norms(recipe, update):
        owner = trainer.started.exchange.owner
        weights = {name: float(told.values[owner[name], place]) for place, name in enumerate(sorted(owner))}
        line["grad_norms"], line["weight_norms"] = by_group(told.norms), by_group(weights)
        squares = told.values[:, len(owner) :].ravel().tolist() if recipe.reduction == "canonical" else []
        line["gradient_noise"] = noise(squares, told.grad_norm, recipe.positions_per_update)
    if validation is not None:
        line["validation_loss"], line["validation_by_source"] = validation.loss, validation.by_source
    return line


def mfu_of(recipe: Recipe, parts: Mapping[str, float], peak: int | None) -> dict[str, float | None]:
    """`mfu` by 6N + attention and `mfu_six_n` of an update, its pauses left out; None where something is unknown.

    InputError where it is above 1.
    """
    flops, seconds = flops_per_position(recipe), busy(parts)
    if peak is None or seconds <= 0:
        return {"mfu": None, "mfu_six_n": None}
    speed = recipe.positions_per_update / seconds
    return {"mfu": mfu(speed, sum(flops.values()), peak), "mfu_six_n": mfu(speed, flops["six_n"], peak)}


def _mfu(trainer: Trainer) -> dict[str, float | None]:
    """See `mfu_of`. Above 1 the peak is wrong: alarm, and unknown from here on."""
    try:
        return mfu_of(trainer.recipe, trainer.meters.parts, trainer.meters.peak)
    except InputError as fault:
        trainer.meters.peak = None
        trainer.ledger.append("alarm", {"alarm": "an MFU above 100 %", "mfu": str(fault)})
        trainer.tell(f"ALARM: {fault}; MFU is not measured from here on")
        return {"mfu": None, "mfu_six_n": None}


def look_for_stragglers(trainer: Trainer, update: int) -> None:
    """The receipt `straggler` when a rank's computing was slow for long; every rank calls it after the same word.

    The seconds are those of the update before. Of a sharded model they hold waits for other ranks.
    """
    meters, ranks = trainer.meters, trainer.ranks
    slow = meters.stragglers.take(meters.seconds)
    if not slow:
        return
    states = ranks.collect(meters.sensor.state() if ranks.rank in slow else None)
    if not ranks.first:
        return
    bounds = meters.stragglers.bounds
    for rank in slow:
        body = {
            "rank": rank,
            "device": meters.devices[rank],
            "segment": trainer.segment,
            "last_update": update - 1,
            "updates": bounds.updates,
            "ratio": repr(bounds.ratio),
            "microseconds": [round(one * 1e6) for one in meters.seconds if one is not None],
            "nvml": states[rank] or "not measured",
        }
        trainer.ledger.append("straggler", body)
        trainer.tell(
            f"rank {rank} is slow: above {bounds.ratio} × the median of all ranks for {bounds.updates} updates"
        )


def compare(trainer: Trainer, line: dict[str, Any]) -> None:
    """Hold an update that was done again against the one it supersedes; a difference is a receipt and an alarm."""
    older = trainer.superseded.pop(line["update"], None)
    if older is None:
        return
    exact = trainer.same_bits(int(older["segment"]))
    wrong = [key for key in ("order_digest", "lr") if older.get(key) != line[key]]
    if older["loss"] is None or (
        older["loss"] != line["loss"] if exact else abs(older["loss"] - line["loss"]) > LOSS_TOLERANCE
    ):
        wrong.append("loss")
    if wrong:
        body = {
            "alarm": "recomputed update differs",
            "update": line["update"],
            "segment": line["segment"],
            "superseded_segment": older["segment"],
            "keys": wrong,
            "bits": "promised" if exact else "not claimed",
            "before": {key: json.dumps(older.get(key)) for key in wrong},
            "after": {key: json.dumps(line.get(key)) for key in wrong},
        }
        trainer.ledger.append("alarm", body)
        trainer.tell(f"ALARM: update {line['update']} done again differs from before in {', '.join(wrong)}")


def superseded(run: RunFolder, step: int) -> dict[int, dict[str, Any]]:
    """Updates from `step` on that an earlier segment did already, by update."""
    return {update: line for update, line in lines.by_update(run.metrics).items() if update >= step}
