"""Scripted harm for tests: what a driver asks before and after it moves a parcel. Absent in production (`NO_FAULTS`).

A real process takes them from the environment variable DECANT_TEST_FAULTS, and only when its option --enable-test-faults is
given. The text is `name=value` pairs, separated by commas; values count a transfer's parcels from 0:

    flip_byte_of_parcel=3     P flips one payload byte of parcel 3 just before it leaves, once
    flip_next_parcel_from=0   P flips one byte of parcel 0 of one transfer, of parcel 1 of another, and so on
    shorten_parcel=3          P sends that parcel without its last 8 bytes, once
    stretch_parcel=3          P sends that parcel with 8 bytes more, once
    hold_sends_from=3         P never sends parcel 3 or any after it
    hold_landed_from=3        D never notices that parcel 3 or any after it has landed
    delay_sends_ms=50         P sends one parcel after another, each so long after the one before it
    stop_before_send=3        P stops itself (SIGSTOP) just before parcel 3 would leave, once; woken, it sends it
    kill_before_send=3        P kills itself (SIGKILL) just before parcel 3 would leave
    kill_after_landed=3       D kills itself once 3 parcels of a transfer have landed

Must not know: protocol, transports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Hashable
from dataclasses import dataclass, fields

import numpy as np

from foundation.errors import ConfigurationError
from kv_transfer.transport.base import Bytes

VARIABLE = "DECANT_TEST_FAULTS"
OPTION = "--enable-test-faults"


@dataclass(slots=True)
class Faults:
    """None: this fault is off. A test may switch faults while the driver runs."""

    flip_byte_of_parcel: int | None = None
    flip_next_parcel_from: int | None = None
    shorten_parcel: int | None = None
    stretch_parcel: int | None = None
    hold_sends_from: int | None = None
    hold_landed_from: int | None = None
    delay_sends_ms: int | None = None
    stop_before_send: int | None = None
    kill_before_send: int | None = None
    kill_after_landed: int | None = None
    _newest_transfer: Hashable = None
    _next_send_at: float = 0.0

    def send_delay_s(self, now: float) -> float:
        """How long the parcel that is ready now must wait."""
        if self.delay_sends_ms is None:
            return 0.0
        self._next_send_at = max(now, self._next_send_at) + self.delay_sends_ms / 1000
        return self._next_send_at - now

    def before_send(self, transfer: Hashable, parcel_index: int, message: Bytes) -> Bytes | None:
        """What leaves instead of this message; None when nothing must."""
        if self.stop_before_send == parcel_index:
            self.stop_before_send = None
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kill_before_send == parcel_index:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.flip_byte_of_parcel == parcel_index:
            self.flip_byte_of_parcel = None
            _flip(message)
        if parcel_index == 0:
            self._newest_transfer = transfer
        if self.flip_next_parcel_from == parcel_index and self._newest_transfer == transfer:
            self.flip_next_parcel_from, self._newest_transfer = parcel_index + 1, None
            _flip(message)
        if self.hold_sends_from is not None and parcel_index >= self.hold_sends_from:
            return None
        if self.shorten_parcel == parcel_index:
            self.shorten_parcel = None
            return message[:-8]
        if self.stretch_parcel == parcel_index:
            self.stretch_parcel = None
            return _stretched(message)
        return message

    def after_landed(self, parcel_index: int, parcels_landed: int) -> bool:
        """False when D must not notice."""
        if self.kill_after_landed == parcels_landed:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.hold_landed_from is None or parcel_index < self.hold_landed_from


def _flip(message: Bytes) -> None:
    """One bit, wherever the message lies."""
    place = slice(len(message) // 3, len(message) // 3 + 1)
    if isinstance(message, np.ndarray):
        message[place] ^= 0x10
    else:
        message[place].write(message[place].read() ^ 0x10)


def _stretched(message: Bytes) -> Bytes:
    if isinstance(message, np.ndarray):
        return np.concatenate([message, np.zeros(8, np.uint8)])
    longer = message.device.allocate(len(message) + 8)
    longer[: len(message)].write(message.read())
    return longer


def faults_of_process(enabled: bool) -> Faults:
    """What a node's main passes on. Raises ConfigurationError when faults are asked for but not enabled, or unknown."""
    text = os.environ.get(VARIABLE, "")
    if text and not enabled:
        raise ConfigurationError(OPTION, f"is required when {VARIABLE} is set; unset the variable in production")
    faults = Faults()
    names = [field.name for field in fields(faults) if not field.name.startswith("_")]
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if name not in names or not value.isdigit():
            raise ConfigurationError(VARIABLE, f"{pair!r} is not one of {', '.join(names)} with =N")
        setattr(faults, name, int(value))
    return faults
