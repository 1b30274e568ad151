"""What a recipe's mirror moves over the network, and what reading it back costs.

Pure arithmetic on the plan's sizes; small files, repeats after faults and a fetch come on top. A price is the user's.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from assay.errors import InputError
from assay.recipe.schema import Recipe

WARN_SHARE = Decimal("0.05")  # of the funds


def traffic(
    recipe: Recipe,
    steps: dict[str, list[int]],
    full_bytes: int,
    weights_bytes: int,
    usd_per_gb: Decimal | None = None,
    funds: Decimal | None = None,
) -> dict[str, Any] | None:
    """Copies, bytes sent and read back, and the cost of what leaves the store; None where the recipe has no mirror.

    `usd_per_gb`: the store's price of a gigabyte (10^9 bytes) that is read from it. Sending is not priced: what leaves
    a machine is its provider's to charge, and most charge nothing. Full checkpoints count by `mirror.every`, the first
    and the last included; stops add copies of their own.
    """
    if funds is not None and usd_per_gb is None:
        raise InputError("--funds is given without --usd-per-gb; both are needed to weigh the price of reading back")
    mirror = recipe.checkpoint.mirror
    if mirror is None:
        return None
    full = steps["full"]
    copies = len(full[:: mirror.every]) + (1 if full and (len(full) - 1) % mirror.every else 0)
    sent = copies * full_bytes + len(steps["weights"]) * weights_bytes
    read_back = sent if mirror.verify == "readback" else 0
    usd = None if usd_per_gb is None else Decimal(read_back) / 10**9 * usd_per_gb
    return {
        "url": mirror.url,
        "verify": mirror.verify,
        "full_copies": copies,
        "weights_copies": len(steps["weights"]),
        "bytes_sent": sent,
        "bytes_read_back": read_back,
        "usd_per_gb": None if usd_per_gb is None else str(usd_per_gb),
        "usd_read_back": None if usd is None else str(usd.quantize(Decimal("0.01"))),
        "share_of_funds": None if usd is None or funds is None else str((usd / funds).quantize(Decimal("0.0001"))),
    }


def warning(found: dict[str, Any] | None) -> list[str]:
    """A sentence when reading copies back takes more than a twentieth of the funds."""
    share = Decimal(found["share_of_funds"]) if found and found["share_of_funds"] is not None else None
    if found is None or share is None or share <= WARN_SHARE:
        return []
    return [
        f"reading copies back from {found['url']} costs {found['usd_read_back']} dollars, {share * 100:.1f} % of the "
        "funds: set checkpoint.mirror.verify to stored (the store checks; such a copy is not called verified), or "
        "checkpoint.mirror.every above 1"
    ]
