"""What a check of pre-flight answers, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from assay.errors import Refused

PASSED, REFUSED, NOT_PINNED, NOT_APPLICABLE = "passed", "refused", "not pinned", "not applicable"


@dataclass(frozen=True)
class Check:
    """One check's name, its result, what was seen, and the exit code that a refusal ends with.

    `receipts` are the bodies of receipts `slot.checked` that the caller writes, so that a start does not repeat them.
    """

    name: str
    result: str
    detail: str
    code: int = Refused.code
    receipts: tuple[dict[str, Any], ...] = ()


def size(count: int) -> str:
    """Bytes for people, in GB or, below one, in MB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
