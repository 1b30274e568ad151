"""What an update costs beside its arithmetic: one wait of the host, no recompilation; and a trace changes no bit."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Project, drive
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from assay.run import metrics
from assay.run.history import history
from assay.train.tracing import Trace

# By which a program looks at the value of a tensor; on a GPU each makes the host wait.
LOOKS = {
    "tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "__contains__", "__format__", "__repr__", "equal", "allclose", "is_nonzero", "unique", "masked_select",
}  # fmt: skip
OPERATIONS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "aten::equal", "unique")


# By which a program makes a tensor out of values of the host.
MAKES = {"tensor", "as_tensor", "asarray"}


class Waits(TorchFunctionMode):
    """Counts looks at values in this thread, whoever makes them: Python or the library's own code.

    Copies to a device that is named, without `non_blocking`, count too: on a GPU the host waits for them. A `copy_`
    between two tensors does not, for here all of them are on one device and nothing tells which would not be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.below = Below(self.seen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LOOKS or copies(name, args[1:], kwargs or {}):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def copies(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call, of these arguments behind the first, copies to a device that is named, and waits for it."""
    if name in MAKES:
        return kwargs.get("device") is not None
    if name not in ("to", "cuda"):
        return False
    named = name == "cuda" or any(isinstance(one, torch.device | str | torch.Tensor) for one in args)
    return (named or bool(kwargs.keys() & {"device", "other"})) and not kwargs.get("non_blocking")


class Below(TorchDispatchMode):
    """Counts operations that give a value to the host."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(operation in str(func) for operation in OPERATIONS):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("path") / "project", slots=((12, 4),))


RARELY = {"checkpoint__every": 100, "evaluate": {"every": None}, "log": {"every": 1}}
SCHEDULE = {"kind": "constant", "updates": 12, "warmup": 2}


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_host_waits_for_the_device_once_an_update_and_never_else(project: Project, kind: str) -> None:
    """Two runs that differ by four updates alone differ by four waits."""
    optimizer = {"kind": kind, "lr": 0.003, "grad_clip": 0.5}
    recipe = project.recipe(kind, optimizer=optimizer, schedule=SCHEDULE, model__logit_cap=20.0, **RARELY)
    seen = []
    for updates in (2, 6):
        waits = Waits()
        with waits, waits.below:
            assert drive(recipe, project.path / f"{kind}-{updates}", until=str(updates)) == 0
        seen.append(waits.seen)
    assert sum(seen[0].values()) > 2, "the start and the save look at values too: the count is worth something"
    assert seen[1] - seen[0] == {"tolist": 4}
    assert not seen[0] - seen[1]


def test_what_makes_the_host_wait_is_counted_and_nothing_else() -> None:
    here, number = torch.device("cpu"), torch.ones(2)
    waits = Waits()
    with waits, waits.below:
        for quiet in (
            lambda: number.to(torch.float64), lambda: number.to(here, non_blocking=True), lambda: number.clone(),
            lambda: number.to(dtype=torch.float64, copy=True), lambda: torch.tensor(1.0),
            lambda: torch.zeros(2, device=here),
        ):  # fmt: skip
            quiet()
            assert not waits.seen
        for looks in (
            lambda: number.to("cpu"), lambda: number.to(here), lambda: number.to(device=here), number.cpu,
            lambda: number.to(number), lambda: number.to(here, torch.float64), number.tolist,
            lambda: torch.tensor(1.0, device=here),
            lambda: torch.as_tensor([1.0], device="cpu"), lambda: number[0].item(), lambda: bool(number[0]),
        ):  # fmt: skip
            before = sum(waits.seen.values())
            looks()
            assert sum(waits.seen.values()) > before


# Dynamo looks at the attribute `grad` of the activations that it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
def test_compiled_blocks_are_compiled_once_each_way_and_never_again(project: Project) -> None:
    """One graph for the first block, which has no earlier values, one for all others; without gradients, one each.

    The numbers are those of the blocks as they are written.
    """
    torch._dynamo.reset()
    counters.clear()
    recipe = project.recipe(
        "compiled", runtime={"device": "cpu", "compile": True, "recompute": "selective"}, schedule=SCHEDULE,
        model__layers=4, checkpoint__every=100, evaluate={"every": 3, "batches": 2},
    )  # fmt: skip
    assert drive(recipe, project.path / "compiled") == 0
    assert counters["stats"]["unique_graphs"] == 4 + 2, "and the loss of a chunk each way"
    assert not counters["graph_break"]
    plain = project.recipe(
        "plain", schedule=SCHEDULE, model__layers=4, checkpoint__every=100, evaluate={"every": 3, "batches": 2}
    )
    assert drive(plain, project.path / "not-compiled") == 0
    lines = [metrics.by_update(project.path / name / "metrics.jsonl") for name in ("compiled", "not-compiled")]
    for update, line in lines[0].items():
        for key in line.keys() & {"loss", "grad_norm", "z_loss", "validation_loss"}:
            assert line[key] == pytest.approx(lines[1][update][key], rel=1e-4)


def test_a_trace_shows_the_updates_after_the_warm_up_and_changes_no_bit(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = project.recipe("traced", schedule=SCHEDULE, **RARELY)
    plain, traced, short = (project.path / name for name in ("plain", "traced", "short"))
    assert drive(recipe, plain, until="8") == 0
    assert drive(recipe, traced, until="8", profile=2) == 0
    assert [metrics.comparable(line) for line in metrics.read(plain / "metrics.jsonl")] == [
        metrics.comparable(line) for line in metrics.read(traced / "metrics.jsonl")
    ]
    states = [[item.state_sha256 for item in history(run / "ledger.jsonl").saved] for run in (plain, traced)]
    assert states[0] == states[1]
    (file,) = (traced / "logs" / "segment-01").glob("profile-*.json")
    assert file.name == "profile-rank-0-updates-3-5.json"
    assert f"trace of updates 3:5 written: {file}\n" in capsys.readouterr().err
    text = file.read_text()
    steps = [event for event in json.loads(text)["traceEvents"] if str(event.get("name")).startswith("ProfilerStep#")]
    assert len(steps) == 2
    assert "aten::mm" in text
    assert str(project.path) not in text
    assert not list(plain.rglob("profile-*")), "nobody asked for one"
    # Training that ends before the trace is whole leaves what there is.
    assert drive(recipe, short, until="5", profile=100) == 0
    (file,) = (short / "logs" / "segment-01").glob("profile-*.json")
    assert file.name == "profile-rank-0-updates-3-5.json"


@pytest.mark.parametrize("updates", [1, 100])
def test_a_recorder_that_fails_neither_ends_a_run_nor_hides_why_one_ended(updates: int) -> None:
    told: list[str] = []
    trace = Trace(updates, Path("no\0place"), 0, torch.device("cpu"), told.append)

    def end_badly() -> None:
        with closing(trace):
            for update in range(6):
                trace.at(update)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        end_badly()
    (words,) = told
    assert words.startswith("no trace was written: ")


def test_no_thread_of_a_run_outlives_it(project: Project) -> None:
    before = set(threading.enumerate())
    recipe = project.recipe("threads", schedule=SCHEDULE, **RARELY)
    assert drive(recipe, project.path / "threads", until="3") == 0
    assert {thread for thread in threading.enumerate() if thread not in before} == set()
