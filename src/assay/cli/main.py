"""The `assay` command: hears signals, then parses, calls one function of a room, ends with the contract's exit code.

A fault that a user can meet is one sentence on standard error (with `--json` an object on
standard output as well). Anything else is a bug: exit 70, with the traceback kept for the report.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED = 130  # what the library makes of Ctrl-C where its caller is to give the exit code


def main() -> None:
    """Entry point of the command. Little is imported before it: a signal is answered from its first line on."""
    wants_json = "--json" in sys.argv[1:]
    before = _answer_signals(wants_json)
    # Threads that spin while they wait for work cost a shared machine most of its speed: six times slower
    # was measured beside one busy neighbour. Read when the OpenMP library is loaded, by children too.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import typer

    from assay.cli.commands import app
    from assay.errors import AssayError, Heard

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Heard

    if sys.argv[1:2] != ["train"]:  # which is answered for until it takes over the signals itself
        for number, handler in before.items():
            signal.signal(number, interrupt if handler is signal.default_int_handler else handler)
    try:
        code = app(standalone_mode=False)  # None, or what a command's typer.Exit says
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except typer.TyperException as fault:
        from assay.cli import usage

        if usage.is_help(fault):
            print(fault.format_message(), file=sys.stderr)
        else:
            _tell(usage.sentence(fault), 2, wants_json)
        sys.exit(2)
    except AssayError as fault:
        _tell(str(fault), fault.code, wants_json)
        sys.exit(fault.code)
    except OSError as fault:
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        _tell(
            f"{fault.filename or 'a file'} could not be read or written: {fault.strerror or fault}",
            71 if full else 2,
            wants_json,
        )
        sys.exit(71 if full else 2)
    except KeyboardInterrupt:
        _tell("interrupted", 75, wants_json)
        sys.exit(75)
    except ModuleNotFoundError as fault:
        extra = _extra(fault.name or "")
        if extra is None:
            raise
        _tell(f"{fault.name} is not installed; pip install 'assay[{extra}]' brings it", 2, wants_json)
        sys.exit(2)
    except Exception:  # noqa: BLE001 - the one place where a bug becomes exit code 70
        import traceback

        traceback.print_exc()
        _tell("internal fault: this is a bug in Assay; please report the lines above", 70, wants_json)
        sys.exit(70)


def _answer_signals(wants_json: bool) -> dict[signal.Signals, signal._HANDLER]:
    """One sentence and exit 75 while modules are imported; returns what was there before.

    It leaves at once: an exception may be lost in an import, or come out of it as a traceback. A signal that whoever
    started us had us ignore stays ignored.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        message = "interrupted before anything began"
        try:
            os.write(2, f"assay: {message}\n".encode())
            if wants_json:
                os.write(1, f'{{"ok": false, "error": "{message}", "exit": 75}}\n'.encode())
        finally:  # also where nobody reads it
            os._exit(75)

    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, leave)
    return before


def _extra(module: str) -> str | None:
    """The extra that brings a module, or None when no extra does."""
    top = module.split(".")[0]
    if top in ("torch", "safetensors", "transformers"):
        return "train"
    corpus = ("httpx2", "huggingface_hub", "py3langid", "pyarrow", "rensa", "tokenizers", "zstandard")
    return "corpus" if top in corpus else None


def _tell(message: str, code: int, wants_json: bool) -> None:
    from assay.cli.show import as_json, note

    note(f"assay: {message}")
    if wants_json:
        as_json({"ok": False, "error": message, "exit": code})


if __name__ == "__main__":
    main()
