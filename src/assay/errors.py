"""The faults that Assay answers for, each with the exit code of the contract.

Every sentence names the file, the key, the value and the way out. Anything that is not an
`AssayError` is a bug and ends with exit code 70.
"""

from __future__ import annotations


class AssayError(Exception):
    """Base of all faults that a user can meet; `code` is the exit code of the process."""

    code = 70


class InputError(AssayError):
    """Wrong usage or an invalid input file."""

    code = 2


class Refused(AssayError):
    """A rule of the run forbids it: pre-flight, pin, approval, amendment rule, hold, budget."""

    code = 3


class DataError(AssayError):
    """Data is missing, exhausted, not there yet, or not the bytes that were approved."""

    code = 4


class NumbersError(AssayError):
    """A loss or gradient that is not finite; the optimizer has changed nothing."""

    code = 5


class VerificationError(AssayError):
    """A claim or a comparison does not hold."""

    code = 6


class MachineError(AssayError):
    """Out of memory, device lost, communication, disk full, hang."""

    code = 71


class Interrupted(AssayError):
    """Stopped with the state saved; `cause` is preempted, signal, network, stop or guard."""

    code = 75

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, str]]:
        return Interrupted, (str(self), self.cause)  # so that it arrives whole from another process


class Heard(KeyboardInterrupt):
    """What a signal raises. After a plain KeyboardInterrupt in executed text (as in every dataclass that is made)
    Python ends the process by SIGINT at its exit, whatever code it leaves with; it asks for that very class.
    """
