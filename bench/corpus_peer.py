"""datatrove's chain for `bench/corpus.py`, run by the peer's interpreter: read, length, MinHash, tokenize.

`python corpus_peer.py SOURCES TOKENIZER OUT SMALLEST BANDS ROWS SHINGLE` reads SOURCES/en.jsonl and pl.jsonl and prints
one JSON object: processor seconds by step, what was left, the peak of memory. Knows nothing of Assay.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.utils.typeshelper import Languages


def main() -> None:
    """Run the four steps of deduplication, the last one with the tokenizer behind it."""
    sources, tokenizer, out = sys.argv[1:4]
    smallest, bands, rows, shingle = map(int, sys.argv[4:8])
    config = MinhashConfig(n_grams=shingle, num_buckets=bands, hashes_per_bucket=rows)

    def read() -> list[PipelineStep]:
        return [JsonlReader(sources), LambdaFilter(lambda document: len(document.text) >= smallest)]

    def sign(language: str) -> list[PipelineStep]:
        return [*read(), MinhashDedupSignature(f"{out}/signatures", config, language)]

    seconds = {}
    # One task a file, in the order of their names; each with the words of its language.
    for task, language in enumerate((Languages.english, Languages.polish)):
        seconds[f"read, filter, sign: {language}"] = run(sign(language), f"{out}/log-{task}", 2, 1, task)
    buckets = MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config, only_dedup_in_index=False)
    seconds["buckets"] = run([buckets], f"{out}/log-2", bands)
    seconds["cluster"] = run([MinhashDedupCluster(f"{out}/buckets", f"{out}/removed", config)], f"{out}/log-3", 1)
    last = [
        *read(),
        MinhashDedupFilter(f"{out}/removed"),
        DocumentTokenizer(f"{out}/tokens", tokenizer, eos_token="<|endoftext|>", shuffle_documents=False),
    ]
    seconds["read, filter, remove, tokenize"] = run(last, f"{out}/log-4", 2)
    index = sum(path.stat().st_size for path in Path(f"{out}/tokens").glob("*.index"))
    tokens = sum(path.stat().st_size for path in Path(f"{out}/tokens").glob("*.ds"))
    answer = {
        "version": version("datatrove"),
        "seconds": seconds,
        "documents": index // 8,
        "tokens": tokens // 2,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    print(json.dumps(answer))


def run(pipeline: list[PipelineStep], log: str, tasks: int, local: int = -1, first: int = 0) -> float:
    """Processor seconds of a pipeline's tasks, one after another in this process, and of what it starts for them."""
    before = spent()
    LocalPipelineExecutor(
        pipeline, tasks=tasks, workers=1, logging_dir=log, local_tasks=local, local_rank_offset=first
    ).run()
    return spent() - before


def spent() -> float:
    """Processor seconds of this process and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    os.environ["LOGURU_LEVEL"] = "ERROR"
    main()
