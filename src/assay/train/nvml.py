"""What NVML knows of this rank's GPU: power, energy, clocks, temperature, throttle reasons.

A thread of its own asks once a second, so that training never waits for the driver. Whatever the library or
the device does not tell is None, never zero. It changes no setting of the device.
"""

from __future__ import annotations

import threading
from typing import Any

SECONDS = 1.0  # between two readings
LEAVE_SECONDS = 5.0  # how long a driver that does not answer may hold up the end


class Sensor:
    """Readings of one GPU: `power` in milliwatts, `energy` in millijoules since the beginning; None: not measured."""

    def __init__(self, uuid: str | None) -> None:
        """`uuid` as CUDA states it, without or with its prefix; None: there is no GPU."""
        self.power: int | None = None
        self.energy: int | None = None
        self._library, self._handle = _open(uuid)
        self._first: int | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if self._handle is not None:
            self._read()
            self._thread = threading.Thread(target=self._watch, name="nvml", daemon=True)
            self._thread.start()

    def state(self) -> dict[str, Any] | None:
        """Clocks, temperature and throttle reasons at this moment, each None where the device tells none."""
        if self._handle is None:
            return None
        nvml, handle = self._library, self._handle
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return {
            "sm_mhz": self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "celsius": self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "milliwatts": self._ask("nvmlDeviceGetPowerUsage", handle),
            "throttle_reasons": None if reasons is None else _names(nvml, reasons),
        }

    def close(self) -> None:
        """End the thread, which reads once more; a driver that hangs is left behind and ends with the process."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(SECONDS)
            self._read()

    def _read(self) -> None:
        self.power = self._ask("nvmlDeviceGetPowerUsage", self._handle)
        total = self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        if self._first is None:
            self._first = total
        self.energy = None if total is None or self._first is None else total - self._first

    def _ask(self, what: str, *about: Any) -> int | None:
        try:
            return int(getattr(self._library, what)(*about))
        except self._library.NVMLError:  # this device does not tell it
            return None


def _open(uuid: str | None) -> tuple[Any, Any]:
    """Library and handle of the device; (…, None) where either is not to be had."""
    if uuid is None:
        return None, None
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(named)
    except pynvml.NVMLError:
        return None, None


def _names(nvml: Any, reasons: int) -> list[str]:
    """The bits of a mask of throttle reasons by NVML's own names, such as `SwPowerCap`."""
    start = "nvmlClocksEventReason"
    known = {name.removeprefix(start): getattr(nvml, name) for name in dir(nvml) if name.startswith(start)}
    return sorted(name for name, bit in known.items() if name not in ("All", "None") and bit and reasons & bit == bit)
