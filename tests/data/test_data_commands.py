"""`assay data …` keeps the contract's keys and exit codes, and needs neither torch nor the data for the order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from assay.data import queue as queues
from assay.data.batches import Batches, order_next
from assay.data.queue import Queue
from assay.data.shard import Shard
from assay.files.digest import PREFIX, digest
from assay.ledger.ledger import Ledger, read

Answer = tuple[int, str, str]
Command = Callable[..., Answer]


def facts(answer: Answer, code: int = 0) -> dict[str, Any]:
    assert answer[0] == code, answer
    value = json.loads(answer[1])
    assert value["ok"] is (code == 0)
    return dict(value)


def test_a_shard_is_shown_and_verified(assay: Command, shard: Shard) -> None:
    for command in ("inspect", "verify"):
        found = facts(assay("data", command, shard.path, "--json"))
        assert found["tokens"] == shard.tokens
        assert (found["documents"], found["dtype"], found["sha256"]) == (120, "uint16", shard.sha256)
    assert found["problems"] == []
    code, out, _ = assay("data", "inspect", shard.path)
    assert (code, "pl-docs" in out, f"{shard.tokens:,}" in out) == (0, True, True)


def test_damage_is_exit_4_and_every_shard_is_still_looked_at(assay: Command, queue: Queue, shard: Shard) -> None:
    good = (shard.path / "tokens.bin").read_bytes()
    (shard.path / "tokens.bin").write_bytes(b"\1" + good[1:])
    found = facts(assay("data", "verify", queue.path, "--json"), 4)
    assert "tokens.bin has the digest" in found["problems"][0]
    assert [len(entry["problems"]) for entry in found["shards"]].count(0) == 1
    (shard.path / "tokens.bin").write_bytes(good[:-2])
    other = shard.path.with_name("second")
    found = facts(assay("data", "verify", shard.path, other, "--json"), 4)
    assert "has " in found["problems"][0]
    assert [entry["path"] for entry in found["shards"]] == [str(other)]
    assert assay("data", "verify", shard.path.with_name("nothing"))[0] == 2


def test_from_a_pack_to_a_queue(assay: Command, tmp_path: Path) -> None:
    ids = np.where(np.arange(4000) % 10 == 9, 0, np.arange(4000) % 250 + 1).astype("<u2")
    ids.tofile(tmp_path / "train.bin")
    np.arange(10, 4001, 10, dtype="<u8").tofile(tmp_path / "docs.idx")
    out, queue = tmp_path / "data" / "pack", tmp_path / "data" / "queue.jsonl"
    (tmp_path / "data").mkdir()
    about = ["--vocabulary", 256, "--tokenizer", "test", "--end-of-text", 0]
    sources = ["--source", "first:1000", "--source", "rest", "--language", "en", "--language", "pl"]
    pack = tmp_path / "train.bin", tmp_path / "docs.idx"
    adopted = facts(assay("data", "adopt", *pack, out, *about, *sources, "--json"))
    assert (adopted["tokens"], adopted["documents"], adopted["problems"]) == (4000, 400, [])
    created = facts(assay("data", "create", queue, "--shard", out, "--block", 8, "--json"))

    slot = ["--global-batch", 4, "--updates", 30]
    proposed = facts(assay("data", "propose", queue, f"{out}:0:2000", *slot, "--json"))
    assert {key: proposed[key] for key in ("slot", "tokens", "windows_needed", "windows_available", "head")} == {
        "slot": 0,
        "tokens": 2000,
        "windows_needed": 120,
        "windows_available": 249,
        "head": created["head"],
    }
    code, line, note = assay("data", "propose", queue, f"{out}:0:2000", *slot)
    assert (code, line) == (0, proposed["line"] + "\n")
    assert "120 windows needed" in note
    (tmp_path / "line").write_text(line)
    appended = facts(assay("data", "append", queue, tmp_path / "line", "--json"))
    assert appended["head"] == digest(proposed["line"].encode()) == queues.load(queue).head
    assert [part.source for part in queues.load(queue).slots[0].parts] == ["first", "rest"]

    assert assay("data", "append", queue, tmp_path / "line")[0] == 4
    assert facts(assay("data", "append", queue, out, *slot, "--json"))["slot"] == 1
    refused = json.loads(assay("data", "append", queue, out, "--global-batch", 4, "--updates", 999, "--json")[1])
    assert (refused["ok"], refused["exit"]) == (False, 4)
    assert "windows short" in refused["error"]
    for words in ([out], [tmp_path / "line", out], [f"{out}:x:y", *slot], [f"{out}:5:5", *slot], [out, "--updates", 3]):
        assert assay("data", "append", queue, *words)[0] == 2


def test_the_order_is_known_without_the_data(assay: Command, tmp_path: Path) -> None:
    path = tmp_path / "queue.jsonl"
    made = queues.create(path, block=4096, dtype="uint16", vocabulary=32_768, tokenizer="test")
    pack = [queues.Part(digest(b"pack"), None, 0, 2_800_806_882, "pack")]
    queues.append(path, queues.propose(made, updates=1709, parts=pack, global_batch=256))
    found = facts(assay("data", "order", path, "--seed", 20261109, "--slot", 0, "--json"))
    assert (found["offset"], found["windows"]) == (2_959, 683_790)
    assert found["indices"] == [402131, 626699, 289375, 69024, 482708, 492553, 502848, 466216]
    generator = np.random.default_rng([20261109, 0, 0])
    generator.integers(0, 4096)
    assert found["sha256"] == digest(generator.permutation(683_790).astype("<i8").tobytes())
    words = ("--seed", 20261109, "--global-batch", 256, "--updates", "0:1709", "--range", "0:1925806163", "--json")
    exposed = facts(assay("data", "exposure", path, *words))
    assert exposed["ranges"][0]["positions"] == 1_232_346_307
    assert exposed["by_source"] == {"pack": {"positions": 1_792_016_384, "distinct": 1_792_016_384, "repeated": 0}}
    assert (exposed["recomputed"], list(exposed["by_language"])) == (0, ["unknown"])
    assert assay("data", "order", path, "--seed", 1, "--slot", 1)[0] == 2
    assert assay("data", "order", path, "--seed", 1, "--slot", 0, "--epoch", 1)[0] == 2
    assert assay("data", "exposure", path, "--seed", 1)[0] == 2


def test_two_trainers_are_compared_and_the_receipt_says_so(assay: Command, queue: Queue, tmp_path: Path) -> None:
    words = ["data", "batches", queue.path, "--global-batch", 8]
    answer = assay(*words, "--seed", 3, "--chain", "--json")
    printed = facts(answer)
    opened = Batches(queue, [], 3, 8)
    assert printed["batches"] == [{"update": u, "sha256": opened.digest(u)} for u in (0, 19, 20, 28, 29, 49)]
    order = opened.order_start()
    for update in range(50):
        order = order_next(order, opened.digest(update))
    assert printed["order_digest"] == PREFIX + order.hex()
    (tmp_path / "e.json").write_text(answer[1])

    (tmp_path / "run").mkdir()
    ledger = Ledger.create(tmp_path / "run" / "ledger.jsonl", "id")
    ledger.append("run.created", {"run_id": "id"})
    (tmp_path / "run" / "recipe.json").write_text("{}")
    checked = [*words, "--expect", tmp_path / "e.json", "--run", tmp_path / "run"]
    assert facts(assay(*checked, "--seed", 3, "--json"))["differences"] == []
    assert len(facts(assay(*checked, "--seed", 4, "--json"), 6)["differences"]) == 6
    receipts = [receipt for receipt in read(ledger.path) if receipt.kind == "batches.checked"]
    assert [len(receipt.body["differences"]) for receipt in receipts] == [0, 6]
    assert receipts[0].body["expected"] == digest(answer[1].encode())
    assert receipts[0].body["head"] == queue.head

    code, out, err = assay(*words, "--expect", tmp_path / "e.json", "--seed", 4)
    assert (code, out.count("differs"), "6 of 6 batches differ" in err) == (6, 6, True)
    only = facts(assay(*words, "--seed", 3, "--updates", "19,0", "--expect", tmp_path / "e.json", "--json"))
    assert [entry["update"] for entry in only["batches"]] == [0, 19]
    assert assay(*words, "--seed", 3, "--updates", "50")[0] == 4
    assert assay(*words, "--seed", 3, "--updates", "a")[0] == 2


def test_the_data_room_works_where_torch_cannot_be_imported() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import assay.data.batches, assay.data.exposure\n"
        "assert not [name for name in sys.modules if name.startswith(('torch.', 'pydantic', 'rich'))]\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
