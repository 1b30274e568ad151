"""Exposure agrees with counting target by target, and with the figure that the seeds state."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data import exposure
from assay.data import queue as queues
from assay.data.exposure import Consumed, Counts, Exposure
from assay.data.queue import Part, Queue, Slot
from assay.data.shard import Shard, Source
from assay.errors import DataError, InputError
from assay.files.digest import digest


def in_memory(block: int, slots: list[tuple[int, int, list[Part]]]) -> Queue:
    """A queue of (updates, epochs, parts) that needs no file."""
    made: list[Slot] = []
    first = 0
    for number, (updates, epochs, parts) in enumerate(slots):
        tokens = sum(part.tokens for part in parts)
        made.append(Slot(number, updates, epochs, tuple(parts), tokens, None, digest(b"line"), first))
        first += updates
    return Queue(Path("q"), block, "uint16", 9, "t", None, None, None, b"{}", digest(b"{}"), tuple(made), b"{}\n")


def part(shard: str, start: int, stop: int, source: str = "a") -> Part:
    return Part(digest(shard.encode()), None, start, stop, source)


PACK = in_memory(4096, [(1709, 1, [part("pack", 0, 2_800_806_882, "pack")])])


def test_the_exposure_of_1_08_comes_out() -> None:
    counted = Exposure([Consumed(PACK, 20261109, 256, 0, 1709)])
    assert counted.range(PACK, 0, 0, 1_925_806_163) == Counts(1_232_346_307, 1_232_346_307)
    assert counted.total.positions == 1709 * 1_048_576 == 1_792_016_384


def test_over_inputs_it_would_be_one_more() -> None:
    """The mission's remark: shifting the range by one target counts the inputs."""
    counted = Exposure([Consumed(PACK, 20261109, 256, 0, 1709)])
    assert counted.range(PACK, 0, 1, 1_925_806_164).positions == 1_232_346_308


def test_the_sources_of_c01_add_up() -> None:
    halves = [part("c01", 0, 4_278_190_159, "main"), part("c01", 4_278_190_159, 5_347_737_900, "second")]
    queue = in_memory(4096, [(5000, 1, halves)])
    assert queue.slots[0].tokens == 5_347_737_900
    counted = Exposure([Consumed(queue, 20261109, 256, 0, 5000)])
    assert counted.total == Counts(5_242_880_000, 5_242_880_000)
    assert sum(counts.positions for counts in counted.by_source().values()) == 5_242_880_000


@st.composite
def histories(draw: st.DrawFn) -> list[Consumed]:
    """One or two runs over queues whose slots overlap in few shards."""
    consumed = []
    for _ in range(draw(st.integers(1, 2))):
        block, batch, seed = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(0, 99))
        slots = []
        for number in range(draw(st.integers(1, 3))):
            parts = []
            for _ in range(draw(st.integers(1, 3))):
                start = draw(st.integers(0, 60))
                length = draw(st.integers(1, 50))
                parts.append(part(draw(st.sampled_from("xy")), start, start + length, draw(st.sampled_from("ab"))))
            tokens, epochs = sum(p.tokens for p in parts), draw(st.integers(1, 3))
            held = queues.Stream(seed, number, tokens, block, epochs).capacity() // batch
            if tokens > block and held:
                slots.append((draw(st.integers(1, held)), epochs, parts))
            else:
                break
        queue = in_memory(block, slots)
        first = draw(st.integers(0, queue.updates_total))
        consumed.append(Consumed(queue, seed, batch, first, draw(st.integers(first, queue.updates_total))))
    return consumed


def counted_one_by_one(consumed: list[Consumed]) -> dict[str, Counter[tuple[str, int]]]:
    """Source → how often each (shard, index) was a target, window by window."""
    seen: dict[str, Counter[tuple[str, int]]] = {}
    for item in consumed:
        block = item.queue.block
        for update in range(item.first, item.last):
            slot, k = item.queue.slot_of(update)
            stream = [(p.shard, index, p.source) for p in slot.parts for index in range(p.start, p.stop)]
            for start in slot.stream(item.seed, block).starts(k * item.global_batch, (k + 1) * item.global_batch):
                for shard, index, source in stream[start + 1 : start + block + 1]:
                    seen.setdefault(source, Counter())[shard, index] += 1
    return seen


@given(consumed=histories(), data=st.data())
def test_exposure_agrees_with_counting_target_by_target(consumed: list[Consumed], data: st.DataObject) -> None:
    counted, truth = Exposure(consumed), counted_one_by_one(consumed)
    everything = sum(truth.values(), Counter())
    assert counted.total == Counts(everything.total(), len(everything))
    assert counted.by_source() == {name: Counts(seen.total(), len(seen)) for name, seen in sorted(truth.items())}
    assert set(counted.by_language()) <= {"unknown"}
    queue = consumed[0].queue
    for slot in queue.slots:
        start = data.draw(st.integers(0, slot.tokens - 1))
        stop = data.draw(st.integers(start + 1, slot.tokens))
        stream = [(p.shard, index) for p in slot.parts for index in range(p.start, p.stop)]
        asked = set(stream[start:stop])
        inside = {place: count for place, count in everything.items() if place in asked}
        assert counted.range(queue, slot.number, start, stop) == Counts(sum(inside.values()), len(inside))


def test_a_second_epoch_repeats_and_a_second_run_repeats() -> None:
    queue = in_memory(4, [(20, 2, [part("x", 0, 45)])])
    held = queue.slots[0].stream(5, 4).size(0)[1]
    once = Exposure([Consumed(queue, 5, 1, 0, held)])
    assert once.total == Counts(held * 4, held * 4)
    again = Exposure([Consumed(queue, 5, 1, 0, held), Consumed(queue, 5, 1, 0, held)])
    assert again.total == Counts(2 * held * 4, held * 4)
    assert again.total.facts()["repeated"] == held * 4


def test_languages_come_from_the_manifests_that_are_at_hand(queue: Queue, shard: Shard) -> None:
    counted = Exposure([Consumed(queue, 3, 8, 0, 20)], queues.locate(queue, []))
    by_language, by_source = counted.by_language(), counted.by_source()
    assert by_language == {"en": by_source["en-docs"], "pl": by_source["pl-docs"]}
    assert sum(counts.positions for counts in by_language.values()) == 20 * 8 * 16
    far = Exposure([Consumed(queue, 3, 8, 0, 20)])
    assert far.by_language() == {"unknown": far.total}
    assert far.by_source() == by_source
    assert isinstance(shard.sources[0], Source)


def test_one_hundred_billion_tokens_are_accounted_within_2_gb() -> None:
    slots = [(4700, 1, [part(f"shard {n}", 0, 5_000_000_000)]) for n in range(20)]
    queue = in_memory(4096, slots)
    tracemalloc.start()
    counted = Exposure([Consumed(queue, 1, 256, 0, queue.updates_total)])
    total = counted.total
    starts = queue.slots[19].stream(1, 4096).starts(4699 * 256, 4700 * 256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == Counts(20 * 4700 * 1_048_576, 20 * 4700 * 1_048_576)
    assert len(np.unique(starts)) == 256
    assert peak < 500_000_000


def test_what_cannot_be_accounted_for_is_refused() -> None:
    with pytest.raises(DataError, match="holds 1,709 updates, but 1,710 are accounted for"):
        Exposure([Consumed(PACK, 1, 256, 0, 1710)])
    with pytest.raises(DataError, match="windows short"):
        Exposure([Consumed(PACK, 1, 512, 0, 1709)])
    nothing = Exposure([])
    assert nothing.total == Counts(0, 0)
    assert nothing.range(PACK, 0, 0, 5) == Counts(0, 0)
    for slot, start, stop in ((1, 0, 5), (0, 5, 5), (0, 0, 2_800_806_883)):
        with pytest.raises(InputError, match=r"among them|not a range"):
            nothing.range(PACK, slot, start, stop)


@pytest.mark.parametrize("text", ["", "5", "a:b", "5:5", "6:5", "-1:4", "1:2:3", "²:5"])
def test_an_interval_is_two_numbers_in_order(text: str) -> None:
    assert exposure.parse_interval("0:1_709", "--updates") == (0, 1709)
    with pytest.raises(InputError, match="--updates is"):
        exposure.parse_interval(text, "--updates")
