"""The line of an update in metrics.jsonl, and its comparison with the line that it supersedes."""

from __future__ import annotations

import json
from typing import Any

from assay.ledger.ledger import now
from assay.run import metrics as lines
from assay.run.folder import RunFolder
from assay.train import numerics
from assay.train.trainer import Trainer

# Two segments that promise other bits than each other still agree about a loss to this many nats.
LOSS_TOLERANCE = 0.00005


def line_of(
    trainer: Trainer,
    update: int,
    loss: float,
    z_loss: float,
    grad_norm: float,
    rate: dict[str, float],
    seconds: float,
    validation: float | None,
) -> dict[str, Any]:
    peak, used = numerics.memory(trainer.device)
    line: dict[str, Any] = {
        "update": update,
        "segment": trainer.segment,
        "time": now(),
        "loss": loss,
        "lr": rate.get("lr"),
        "muon_lr": rate.get("muon_lr"),
        "grad_norm": grad_norm,
        "seconds": seconds,
        "tokens_per_second": trainer.recipe.positions_per_update / seconds if seconds else None,
        "memory_peak": peak,
        "memory_used": used,
        "order_digest": trainer.started.position.order_digest,
    }
    if update in trainer.superseded:
        line["recomputed"] = True
    if trainer.recipe.loss.z:
        line["z_loss"] = trainer.recipe.loss.z * z_loss
    if validation is not None:
        line["validation_loss"] = validation
    return line


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
