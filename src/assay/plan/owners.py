"""Who owns which tensor: every whole tensor has one owner among the ranks, under every optimizer.

A pure function of the shapes and the number of ranks, so that plan and trainer cannot disagree. It
knows nothing of devices or of what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

BUCKET = 1 << 26  # elements that a rank sends, and receives, in one step of the exchange of gradients


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Name → owning rank: by falling size, then name, each to the rank that has least so far, the lowest of equals.

    `sizes` are numbers of elements. A rank may own nothing when there are fewer tensors than ranks.
    """
    load = [0] * ranks
    result: dict[str, int] = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        rank = load.index(min(load))
        result[name] = rank
        load[rank] += sizes[name]
    return result
