"""Which language a text is in, asked of py3langid's model, which comes inside its package.

Nothing is fetched, and the same text has the same answer in every process. One answer a text: a text that
mixes languages gets the one that its beginning speaks most.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from assay.errors import InputError

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

PREFIX = 1_000
UNKNOWN = "und"
_LOADING = threading.Lock()


def identify(text: str) -> tuple[str, float]:
    """(ISO 639 code, probability between 0 and 1) from the first 1,000 characters after leading white space.

    The probability is normalised over the model's 97 languages and rounded to four decimals, below which
    machines may differ. A beginning without any letter is ("und", 0.0). The first call of a process loads the
    model, about a second. Raises InputError when the extra `corpus` is not installed.
    """
    beginning = text.lstrip()[:PREFIX]
    if not any(map(str.isalpha, beginning)):
        return UNKNOWN, 0.0
    with _LOADING:  # two threads would load it twice
        identifier = _identifier()
    name, probability = identifier.classify(beginning)
    return str(name), round(float(probability), 4)


def method() -> dict[str, str | int]:
    """What an answer depends on, for receipts."""
    return {"library": "py3langid", "version": version("py3langid"), "characters": PREFIX}


@cache
def _identifier() -> LanguageIdentifier:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise InputError("language identification needs py3langid; install the extra: assay[corpus]") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
