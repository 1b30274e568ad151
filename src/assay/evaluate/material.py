"""What a run's recipe points at on this machine: validation shard, queue header, tokenizer.

Found by digest, never by name alone. Nothing is searched outside the recipe's data roots, and what is not
there is None, never a substitute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from assay.corpus import tokenizer as tokenizers
from assay.corpus.tokenizer import Tokenizer
from assay.data import queue as queues
from assay.data.shard import Shard, open_shard, scan
from assay.errors import AssayError, DataError
from assay.files.reading import read_bytes
from assay.run.folder import RunFolder
from assay.run.inputs import data_roots, queue_path, tokenizer_file


def validation_shard(run: RunFolder) -> Shard | None:
    """The shard that the recipe holds out; None when it names none, DataError when it is not on this machine."""
    named = run.recipe().data.validation
    if named is None:
        return None
    place = run.recipe_folder() / named
    if not place.is_dir():
        raise DataError(f"{place} is not on this machine; bring the validation shard there, or name one with --data")
    return open_shard(place)


def tokenizer_digest(run: RunFolder) -> str | None:
    """The tokenizer that the run's ids belong to, as the queue's header names it; None without the queue."""
    path = queue_path(run, run.recipe())
    return queues.load(path).tokenizer if path.is_file() else None


def find_tokenizer(run: RunFolder) -> Tokenizer | None:
    """The tokenizer of the queue's header, from a `tokenizer.json` of that digest under the data roots.

    Its end of text is the id that the run's shards end their documents with. None when file or shards are
    not on this machine.
    """
    wanted = tokenizer_digest(run)
    if wanted is None:
        return None
    path = tokenizer_file(run, run.recipe(), wanted)
    identity = next((shard.end_of_text for shard in _shards(run) if shard.tokenizer == wanted), None)
    if path is None or identity is None:
        return None
    return read_tokenizer(path, identity)


def read_tokenizer(path: Path, end_of_text: int) -> Tokenizer:
    """The tokenizer in a `tokenizer.json` whose end of text has that id; InputError when it has none."""
    from tokenizers import Tokenizer as Inner

    data = read_bytes(path, "a tokenizer.json")
    try:
        text = Inner.from_str(data.decode("utf-8")).id_to_token(end_of_text)
    except Exception as error:  # noqa: BLE001  tokenizers raises bare Exception for every fault of the file
        raise DataError(f"{path} is not a tokenizer.json that `tokenizers` reads: {error}") from None
    if text is None:
        raise DataError(f"{path} has no token {end_of_text}, but the shards end their documents with it")
    return tokenizers.from_bytes(data, text, str(path))


def _shards(run: RunFolder) -> Iterator[Shard]:
    for root in data_roots(run, run.recipe()):
        for _, folder in scan(root):
            try:
                yield open_shard(folder)
            except AssayError:
                continue  # a damaged shard is the business of whoever reads it
