"""datatrove's n-gram decontamination behind a pipe, for `bench/decontamination.py`; runs under the peer's interpreter.

Reads a JSON object a line, `{"items", "n", "folder"}` first and then `{"documents"}`, and answers each with one line:
which documents were found, and the processor seconds it took. Knows nothing of Assay.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
from datatrove.utils.text import ngrams, simplify_text


def main() -> None:
    """Answer until the pipe closes."""
    first = json.loads(sys.stdin.readline())
    config = NGramsDecontConfig(n_grams=first["n"])
    held = NGramsDecontFilter(first["folder"], config)
    # What its indexer does for a label without a query; the indexer itself asks for lighteval's tasks.
    hashes = {
        held.hash_func(" ".join(gram))
        for item in first["items"]
        for gram in ngrams(held.tokenizer.word_tokenize(simplify_text(item, config.norm_config)), config.n_grams)
    }
    np.array(sorted(hashes), dtype=config.hash_config.np_descr).tofile(f"{first['folder']}/items.index.hashes")
    held.load_index_hashes()
    answer({"version": version("datatrove"), "grams": len(hashes)})
    for line in sys.stdin:
        documents = [Document(text=text, id="") for text in json.loads(line)["documents"]]
        before = time.process_time()
        found = [held.filter(document) is not True for document in documents]
        answer({"found": found, "seconds": time.process_time() - before})


def answer(value: object) -> None:
    """One line, at once."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
