"""Acts on the policy for loss spikes: the window of norms, the receipt of what is skipped, the stop after too many.

What a spike is, is decided in `run.spikes`. Nothing is left out silently.
"""

from __future__ import annotations

from assay.errors import NumbersError
from assay.run.spikes import judge, taken_up
from assay.train.trainer import Trainer


def watch(trainer: Trainer, norm: float) -> bool:
    """True when the update about to be made is to be skipped, which is then recorded; keeps the window up.

    NumbersError when `most` were skipped right before it. Every rank calls it with the same norm.
    """
    config, position = trainer.recipe.spikes, trainer.started.position
    spike = judge(config, position.norms, norm)
    if spike is None:
        position.norms, position.skipped = taken_up(config, position.norms, norm), 0
        return False
    assert config.rule is not None, "without a rule there are no spikes"
    update, (allowed, window, most) = position.step, config.rule
    if position.skipped >= most:
        skipped = "1 update was" if position.skipped == 1 else f"{position.skipped} updates were"
        raise NumbersError(
            f"update {update}: the gradient norm {norm:.6g} lies {spike.deviations:.1f} deviations above the usual; "
            f"right before it {skipped} skipped for that; spikes.most ({most}) in a row are "
            "allowed: look at the batches (assay data batches) and the rates"
        )
    position.skipped += 1
    if trainer.ranks.first:
        body = {
            "update": update,
            "segment": trainer.segment,
            "grad_norm": repr(norm),
            "limit": repr(spike.limit),
            "deviations": f"{spike.deviations:.3f}",
            "allowed": repr(allowed),
            "window": window,
            "in_a_row": position.skipped,
        }
        trainer.ledger.append("update.skipped", body)
        trainer.tell(
            f"update {update} is skipped: gradient norm {norm:.6g}, above {spike.limit:.6g} "
            f"({spike.deviations:.1f} deviations; {position.skipped} in a row)"
        )
    return True
