# SPDX-License-Identifier: Apache-2.0
"""Settings that a user gives a connector as JSON: every field of a dataclass is a key of it."""
from dataclasses import fields
from typing import Any, Mapping, Type, TypeVar

DIGEST_DIGITS = 64
BUDGET_MS_MAX = 3_600_000
MOST = {"_ms": BUDGET_MS_MAX, "staging_bytes": 1 << 36, "_bytes": 1 << 62}  # by ends of names
NUMBER_MAX = (1 << 31) - 1  # of others
T = TypeVar("T")


def read(cls: Type[T], given: Mapping[str, Any], where: str) -> T:
    """Settings from what the user gave in where. ValueError says which key, why, and the cure."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{where}: {name!r} is not known; there are "
                             f"{', '.join(sorted(known))}")
        default = known[name].default
        wanted = str if default is None else type(default)
        if type(value) is not wanted:
            raise ValueError(f"{where}: {name} is {value!r}, not of type {wanted.__name__}")
        most = next((MOST[end] for end in MOST if name.endswith(end)), NUMBER_MAX)
        if wanted is int and not 0 <= value <= most:
            raise ValueError(f"{where}: {name} is {value}, not from 0 to {most}")
    return cls(**given)


def digest(text: str, where: str) -> bytes:
    """weights_digest as bytes; b"" where it was not given."""
    try:
        made = bytes.fromhex(text)
    except ValueError:
        made = b"?"
    if len(text) not in (0, DIGEST_DIGITS) or len(made) not in (0, DIGEST_DIGITS // 2):
        raise ValueError(f"{where}: weights_digest is not {DIGEST_DIGITS} hexadecimal digits; "
                         "leave it out and it is made from the model's files")
    return made
