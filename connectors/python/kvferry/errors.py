# SPDX-License-Identifier: Apache-2.0
"""Failures are exceptions; outcomes (OK, MISS, EXISTS, COMING, PARTIAL, TOO_SLOW) are not."""
from enum import IntEnum
from typing import Dict, Type

from kvferry._abi import ffi, lib, text


def _statuses() -> Dict[str, int]:
    names = ffi.typeof("enum kvf_status").relements
    return {name[len("KVF_"):]: number for name, number in names.items()}


Status = IntEnum("Status", _statuses())  # type: ignore[misc]
Status.__doc__ = "enum kvf_status of the library that is loaded, without its prefix."


class KvferryError(Exception):
    """A call failed. status is the number, name its name in the C interface."""

    def __init__(self, status: int, what: str = "", why: str = ""):
        self.status = status
        self.name = text(lib.kvf_status_name(status))
        said = why or text(lib.kvf_status_text(status))
        super().__init__(f"{what}: {self.name}: {said}" if what else f"{self.name}: {said}")


class BusyError(KvferryError):
    """A bounded resource is used up at the moment: poll and retry, or skip."""


class SessionError(KvferryError):
    """There is no daemon, or the connection to it broke; the handle reconnects by itself."""

    @property
    def is_attaching(self) -> bool:
        """The handle is about to attach to a daemon again, or has not tried yet: polls move it
        along. False: nobody listens."""
        return bool(self.status == Status["ERR_DISCONNECTED"])


class RefusedError(KvferryError):
    """Policy: the profile is not calibrated, a quota is used up, the namespace takes no writes."""


_CLASSES: Dict[int, Type[KvferryError]] = {
    Status["ERR_BUSY"]: BusyError,
    Status["ERR_DISCONNECTED"]: SessionError,
    Status["ERR_NO_DAEMON"]: SessionError,
    Status["ERR_PROTOCOL"]: SessionError,
    Status["ERR_VERSION"]: SessionError,
    Status["ERR_TIMEOUT"]: SessionError,
    Status["ERR_REFUSED"]: RefusedError,
}


def error(status: int, what: str = "", why: str = "") -> KvferryError:
    """The exception for a status below zero; why: more than the status says by itself."""
    return _CLASSES.get(status, KvferryError)(status, what, why)


def check(status: int, what: str = "") -> Status:
    """status, if it is no failure; else the exception is raised."""
    if status < 0:
        raise error(status, what)
    return Status(status)
