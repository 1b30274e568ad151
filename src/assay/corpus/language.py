"""Which language a text is in, asked of py3langid's model, which comes inside its package.

Nothing is fetched, and the same text has the same answer in every process. One answer a text, from stretches of
all of it: a translation whose first page alone was done is not taken for what its beginning promises.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from assay.errors import InputError

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

CHARACTERS = 1_000  # of a text, however long
STRETCHES = 10
UNKNOWN = "und"
_LOADING = threading.Lock()


def identify(text: str) -> tuple[str, float]:
    """(ISO 639 code, probability between 0 and 1) from 1,000 characters: ten stretches, evenly from begin to end.

    The probability is normalised over the model's 97 languages and rounded to four decimals, below which
    machines may differ. Stretches without any letter are ("und", 0.0). The first call of a process loads the
    model, about a second. Raises InputError when the extra `corpus` is not installed.
    """
    seen = stretches(text.strip())
    if not any(map(str.isalpha, seen)):
        return UNKNOWN, 0.0
    with _LOADING:  # two threads would load it twice
        identifier = _identifier()
    name, probability = identifier.classify(seen)
    return str(name), round(float(probability), 4)


def stretches(text: str) -> str:
    """The text itself up to 1,000 characters, else ten stretches of 100 with the first and the last one at its ends."""
    length = CHARACTERS // STRETCHES
    if len(text) <= CHARACTERS:
        return text
    last = len(text) - length
    return " ".join(text[at : at + length] for at in (last * part // (STRETCHES - 1) for part in range(STRETCHES)))


def method() -> dict[str, str | int]:
    """What an answer depends on, for receipts."""
    return {"library": "py3langid", "version": version("py3langid"), "characters": CHARACTERS, "stretches": STRETCHES}


@cache
def _identifier() -> LanguageIdentifier:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise InputError("language identification needs py3langid; install the extra: assay[corpus]") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
