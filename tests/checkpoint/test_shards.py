"""One checkpoint in shards of many ranks: the same digests as of one, and every shard that is not its own is named."""

from __future__ import annotations

import ctypes
import json
import mmap
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from assay.checkpoint import room
from assay.checkpoint.copies import Copies, bytes_of, not_finite, whole_pages
from assay.checkpoint.load import load
from assay.checkpoint.manifest import MODEL, Manifest, encode, problems, read_manifest, tensor_files, weights_pin
from assay.checkpoint.save import Facts, begin, publish, save, write_part
from assay.errors import DataError, MachineError
from assay.files.digest import digest_file
from assay.plan.owners import owners

ORDER = "sha256:" + "0" * 64
RNG = bytes(torch.Generator().get_state().numpy()).hex()
STATE = f'{{"step": 6, "order_digest": "{ORDER}", "rng": {{"cpu": "{RNG}"}}, "recent": []}}'.encode()
DOCUMENTS = {"state.json": STATE, "recipe.json": b"{}", "config.json": b"{}"}


def facts(step: int = 6) -> Facts:
    return Facts("run", step, 1, "stable", "2026-11-30T10:00:00Z", "r", ORDER, {"seq": 1, "digest": "d"})


def tensors(seed: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Five weights and a state of the optimizer for each."""
    torch.manual_seed(seed)
    model = {f"{name}.weight": torch.randn(size, 4) for name, size in zip("abcde", (9, 7, 5, 3, 2), strict=True)}
    state = {f"optimizer.{name}.momentum": torch.randn_like(tensor) for name, tensor in model.items()}
    return model, state


def sharded(parent: Path, ranks: int, seed: int = 1) -> Manifest:
    """The same state, each tensor with its state written by its owner among `ranks`."""
    model, state = tensors(seed)
    owner = owners({name: tensor.numel() for name, tensor in model.items()}, ranks)
    parent.mkdir(exist_ok=True)
    place = begin(parent, facts())
    parts = []
    for rank in range(ranks):
        mine = {name: tensor for name, tensor in model.items() if owner[name] == rank}
        own = {f"optimizer.{name}.momentum": state[f"optimizer.{name}.momentum"] for name in mine}
        parts.append(write_part(place, mine, own, DOCUMENTS if rank == 0 else {}, rank, ranks))
    return publish(place, "full", facts(), parts, {})


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_number_of_shards_has_the_digests_and_the_tensors_of_one_file(tmp_path: Path, ranks: int) -> None:
    model, state = tensors()
    one = save(tmp_path / "one", facts(), model, state, DOCUMENTS, {})
    many = sharded(tmp_path / "many", ranks)
    assert (many.state_sha256, many.weights_sha256, many.tensors) == (one.state_sha256, one.weights_sha256, one.tensors)
    loaded = load(many.folder)
    assert loaded.model.keys() == model.keys()
    assert all(torch.equal(loaded.model[name], model[name]) for name in model)
    assert all(torch.equal(loaded.optimizer[name], state[name]) for name in state)
    assert not problems(read_manifest(many.folder))
    names = {f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)}
    assert {name for name in many.files if name.startswith("model")} == (names if ranks > 1 else {MODEL})
    assert weights_pin(one) == digest_file(one.folder / MODEL)
    assert weights_pin(many) == (many.weights_sha256 if ranks > 1 else weights_pin(one))


def fault(folder: Path) -> str:
    """What a load says, which `problems` says as well."""
    with pytest.raises(DataError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_a_missing_an_exchanged_and_a_foreign_shard_are_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "mine", 4).folder
    other = sharded(tmp_path / "other", 4, seed=2).folder
    path = folder / "optimizer-00002-of-00004.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "optimizer-00002-of-00004.safetensors is damaged" in fault(folder)
    path.unlink()
    assert "optimizer-00002-of-00004.safetensors is missing" in fault(folder)
    shutil.copyfile(other / path.name, path)
    words = fault(folder)
    assert "optimizer-00002-of-00004.safetensors is of another checkpoint" in words or "is damaged" in words
    path.write_bytes(whole)

    first, last = folder / "model-00003-of-00004.safetensors", folder / "model-00004-of-00004.safetensors"
    shutil.copyfile(other / last.name, last)
    assert "model-00004-of-00004.safetensors is of another checkpoint: it holds none" in fault(folder)
    shutil.copyfile(first, last)
    assert "model-00004-of-00004.safetensors has" in fault(folder)


def forge(folder: Path, **changes: object) -> None:
    """A manifest of the right form that states the digests of whatever lies there."""
    manifest = read_manifest(folder)
    files = {**manifest.files, **changes}
    stated = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest_file(folder / name)}
        for name, item in files.items()
        if item is not None
    }
    (folder / "manifest.json").write_bytes(encode(Manifest(**{**vars(manifest), "files": stated})))


def test_a_manifest_that_lists_no_whole_set_of_shards_is_one_sentence(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "mine", 4).folder
    sound = (folder / "manifest.json").read_bytes()
    forge(folder, **{"model-00002-of-00004.safetensors": None})
    assert "lists no model-00002-of-00004.safetensors of 4 shards" in fault(folder)
    for extra in ("model-00001-of-00002.safetensors", "model.safetensors", "model-00009-of-00004.safetensors"):
        (folder / "manifest.json").write_bytes(sound)
        shutil.copyfile(folder / "model-00001-of-00004.safetensors", folder / extra)
        forge(folder, **{extra: {}})
        assert f"lists {extra} beside shards of 4 ranks" in fault(folder)
    (folder / "manifest.json").write_bytes(sound)
    for wrong, words in (
        ({"a.weight": torch.ones(9, 4), "b.weight": torch.ones(7, 4)}, "another shard holds too"),
        ({"z.weight": torch.ones(2)}, "the manifest does not list"),
        ({}, "no file holds"),
    ):
        (folder / "manifest.json").write_bytes(sound)
        save_file(wrong, folder / "model-00002-of-00004.safetensors")
        forge(folder)
        assert words in fault(folder)
        assert problems(read_manifest(folder)), words
    assert tensor_files(read_manifest(folder), MODEL)[1] == "model-00002-of-00004.safetensors"


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6), st.integers(0, 99))
def test_copies_keep_their_values_whatever_becomes_of_the_originals(shapes: list[list[int]], seed: int) -> None:
    torch.manual_seed(seed)
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    made = {str(i): (torch.randn(shape) * 9).to(kinds[i % 4]) for i, shape in enumerate(shapes)}
    copies = Copies(made)
    assert copies.nbytes == bytes_of(made)
    for turn in range(2):
        before = {name: tensor.clone() for name, tensor in made.items()}
        held = copies.take(made)
        copies.wait()
        for tensor in made.values():
            tensor.copy_(tensor.logical_not())
        for name, tensor in before.items():
            assert held[name].dtype == tensor.dtype
            assert torch.equal(held[name], tensor), turn
            assert held[name].data_ptr() % 64 == 0 or not tensor.numel()


def test_memory_is_registered_with_the_device_until_the_last_tensor_over_it_is_gone_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a driver that keeps the books as CUDA does: what is registered twice, or freed while it is, is told."""
    registered: dict[int, int] = {}

    class Driver:
        def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
            if any(begin < one + length and one < begin + size for one, length in registered.items()):
                return 712  # registered already
            registered[begin] = size
            return 0

        def cudaHostUnregister(self, begin: int) -> int:
            held.add(ctypes.string_at(begin, registered.pop(begin))[-1])
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # there is none, and none is chosen
    held = set[int]()
    for turn in range(1, 9):
        pages = whole_pages(1_000_000, locked=True)
        assert registered == {pages.data_ptr(): 1_000_000}
        assert pages.data_ptr() % mmap.PAGESIZE == 0
        pages.fill_(turn)
        last = pages[999_996:].view(torch.int32)
        del pages
        assert len(registered) == 1, "a copy over it is still to be read"
        del last
        assert not registered
        assert turn in held, "it is given back before it is freed"
    assert not whole_pages(0, locked=True).numel()
    whole_pages(1_000_000, locked=False)
    assert not registered


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path) -> None:
    room.demand_space(tmp_path / "checkpoints", "step-000006", 1)
    with pytest.raises(
        MachineError, match=r"step-000006 was not begun: it needs 1,[\d,.]+ MB .*; what was saved before"
    ):
        room.demand_space(tmp_path / "checkpoints", "step-000006", 1 << 60)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("groups", "membership", "free"),
    [
        ({}, None, 8 << 20),  # no control groups: what the machine has
        ({"a/b/memory.max": "5000", "a/b/memory.current": "3000", "a/b/memory.stat": "anon 9\ninactive_file 1000\n",
          "a/memory.max": "max", "a/memory.current": "9999"}, "0::/a/b\n", 3000),
        ({"a/b/memory.max": "9000", "a/b/memory.current": "3000", "a/memory.max": "4000", "a/memory.current": "3500"},
         "0::/a/b\n", 500),
        ({"memory.max": "4000", "memory.current": "4500"}, "0::/not/seen/from/here\n", 0),
        ({"memory/j/memory.limit_in_bytes": "7000", "memory/j/memory.usage_in_bytes": "6000",
          "memory/j/memory.stat": "total_inactive_file 500\n", "memory/memory.limit_in_bytes": "9223372036854771712",
          "memory/memory.usage_in_bytes": "1"}, "4:memory:/j\n9:name=systemd:/\n", 1500),
    ],
)  # fmt: skip
def test_free_memory_is_the_least_of_the_machine_and_its_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, str], membership: str | None, free: int
) -> None:
    for name, text in groups.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable:    8192 kB\n")
    if membership is not None:
        (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
    monkeypatch.setattr(room, "PROC", tmp_path / "proc")
    monkeypatch.setattr(room, "CGROUPS", tmp_path / "cgroup")
    assert room.free_memory() == free
    (tmp_path / "proc" / "meminfo").unlink()
    assert room.free_memory() == (None if not groups else free)


def test_this_machine_says_what_is_free() -> None:
    assert json.dumps(room.free_memory()) != "0"


def test_what_is_not_finite_is_named_whatever_its_kind() -> None:
    sound = {
        "a": torch.randn(3, 2), "b": torch.zeros(0, 4), "c": torch.tensor(7),
        "d": torch.full((1,), 1e300, dtype=torch.float64), "e": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip
    assert not_finite(sound) == []
    assert not_finite({}) == []
    for number in (torch.inf, -torch.inf, torch.nan):
        for name in "ade":
            sick = sound[name].clone()
            sick.view(-1)[-1] = number
            assert not_finite(sound | {name: sick}) == [name]


def test_a_save_without_copies_holds_one_tensor_at_a_time_on_the_host(tmp_path: Path) -> None:
    """Transposed matrices, which like those of a device have to be copied before they can be written."""
    model = {f"{number}.weight": torch.ones(1024, 2048).t() for number in range(8)}
    size = model["0.weight"].nbytes
    place = begin(tmp_path, facts())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    write_part(place, model, None, {})
    assert resident("VmHWM") - before < 4 * size


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
