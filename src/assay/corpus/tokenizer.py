"""The tokenizer of a corpus: trained here as byte-level BPE, or a given `tokenizer.json`.

Training is deterministic: the same texts in the same order give the same bytes. Text never becomes the
end-of-text id, not even text that spells it. `tokenizers` is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from assay.corpus.encoding import Stretches, cuttable
from assay.errors import InputError
from assay.files.digest import digest
from assay.files.reading import read_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Inner

FILE = "tokenizer.json"
BATCH_CHARACTERS = 1 << 20  # texts are encoded in batches of about this size, so that memory does not grow


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with the digest of its file; `vocabulary` is one more than the largest id, added tokens included."""

    inner: Inner
    data: bytes
    digest: str
    vocabulary: int
    end_of_text: int
    stretches: Stretches | None  # None: it is used as it is


def train(texts: Iterable[str], vocabulary: int, end_of_text: str) -> bytes:
    """The `tokenizer.json` of a byte-level BPE tokenizer, `end_of_text` being id 0.

    Raises InputError when the texts hold too few different pairs for `vocabulary` tokens.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    size = inner.get_vocab_size()
    if size != vocabulary:
        raise InputError(
            f"tokenizer.train.vocabulary is {vocabulary}, but the training text yields only {size} tokens; "
            f"ask for {size} at most, or add text"
        )
    text: str = inner.to_str(pretty=False)
    return text.encode("utf-8")


def from_bytes(data: bytes, end_of_text: str, where: str) -> Tokenizer:
    """A tokenizer from the bytes of a `tokenizer.json`; InputError when it is none or lacks the end of text."""
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_str(data.decode("utf-8"))
    except Exception as error:  # noqa: BLE001  tokenizers raises bare Exception for every fault of the file
        raise InputError(f"{where} is not a tokenizer.json that `tokenizers` reads: {error}") from None
    identity = inner.token_to_id(end_of_text)
    if identity is None:
        raise InputError(f"{where} has no token {end_of_text!r}; set end_of_text to the one that it has")
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True  # text that spells a special token stays text
    largest = max(inner.get_vocab(with_added_tokens=True).values())
    end = int(identity)
    return Tokenizer(inner, data, digest(data), largest + 1, end, Stretches(inner, end) if cuttable(inner) else None)


def load(path: Path, end_of_text: str) -> Tokenizer:
    """A tokenizer from its file; see `from_bytes`."""
    return from_bytes(read_bytes(path, "a tokenizer.json"), end_of_text, str(path))


@dataclass(frozen=True)
class Lossy:
    """How decoding differs: the reason, the byte offset where it begins, the text's byte there (None: its end)."""

    reason: str
    at: int
    byte: int | None


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[NDArray[np.uint32], bool]]:
    """For each text its ids, the end of text last, and whether decoding them gives the text back.

    Raises InputError when a text itself holds the end-of-text id: document ends could not be told apart.
    """
    return [(ids, lossy is None) for ids, lossy in round_trip(tokenizer, texts)]


def round_trip(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[NDArray[np.uint32], Lossy | None]]:
    """As `encode`, with what is lost where decoding does not give the text back."""
    found = tokenizer.stretches.encode(texts) if tokenizer.stretches is not None else [None] * len(texts)
    rest = iter(_whole(tokenizer, [text for text, ids in zip(texts, found, strict=True) if ids is None]))
    return [(ids, None) if ids is not None else next(rest) for ids in found]


def _whole(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[NDArray[np.uint32], Lossy | None]]:
    """`round_trip` of texts as they are."""
    ids = [encoding.ids for encoding in tokenizer.inner.encode_batch_fast(texts, add_special_tokens=False)]
    for each, text in zip(ids, texts, strict=True):
        if tokenizer.end_of_text in each:
            raise InputError(
                f"the tokenizer turns text into its end-of-text id {tokenizer.end_of_text} (in {text[:40]!r}…); "
                "use one whose end of text is a special token that no text becomes"
            )
    back = tokenizer.inner.decode_batch(ids, skip_special_tokens=False)
    return [
        (np.array([*each, tokenizer.end_of_text], dtype=np.uint32), None if decoded == text else lost(text, decoded))
        for each, decoded, text in zip(ids, back, texts, strict=True)
    ]


def lost(text: str, decoded: str) -> Lossy:
    """Where and how two different texts part, in UTF-8 bytes of the first."""
    whole, found = text.encode("utf-8"), decoded.encode("utf-8", "surrogatepass")
    both = min(len(whole), len(found))
    at = next((place for place in range(both) if whole[place] != found[place]), both)
    reason = (
        "bytes_dropped" if len(found) < len(whole) else "bytes_added" if len(found) > len(whole) else "bytes_changed"
    )
    return Lossy(reason, at, whole[at] if at < len(whole) else None)


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of a document's ids, its end of text left away."""
    return str(tokenizer.inner.decode([i for i in ids if i != tokenizer.end_of_text], skip_special_tokens=False))
