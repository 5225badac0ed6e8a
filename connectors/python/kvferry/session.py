# SPDX-License-Identifier: Apache-2.0
"""A client handle that may be absent: an engine starts and runs without the daemon."""
import time
import weakref
from typing import Any, Callable, List, Optional

from kvferry.client import SEVERITY_WARNING, Client
from kvferry.errors import KvferryError, SessionError, Status

RETRY_S = 1.0
RETRY_MAX_S = 60.0
NOT_TAKEN = "the daemon does not take this engine: "
CONNECT_TIMEOUT_MS = 5000  # the daemon touches all of the staging that a worker asks for


def agrees(client: Client, lossless: bool) -> bool:
    """Whether the profile in force is of the kind that has been decided for: a handle attaches to a
    daemon that has come back in any of its calls. SessionError: it has not attached, so that nobody
    knows."""
    if client.link() is None:
        client.ping(0)
    return client.info().lossless == lossless


def library_log(session: "Session") -> Callable[[int, str], None]:
    """What hands errors and warnings of a handle to warn; of one that does not come to be the
    exception has them. It keeps the session for nobody: the handle keeps it."""
    known = weakref.ref(session)

    def log(severity: int, line: str) -> None:
        to = known()
        if to is None or severity > SEVERITY_WARNING:
            return
        if to.is_open:
            to._warn(line)
        else:
            to._early.append(line)

    return log


class Session:
    """Opens a handle when it is first wanted, and again a second after that has failed; later and
    later where somebody listens and does not finish. What the library has to say goes to warn: it
    knows causes and cures. Belongs to one thread, as the handle does."""

    def __init__(self, warn: Callable[[str], None], on_open: Callable[[Client], None],
                 **options: Any):
        """on_open(client) looks at each new handle, and again at one that has attached to another
        daemon by itself. It may raise a KvferryError: then the handle is closed. The rest is of
        Client."""
        self._warn = warn
        self._on_open = on_open
        self._options = {"log": library_log(self), **options}
        self._client: Optional[Client] = None
        self._early: List[str] = []  # what was said before there was a handle
        self._link = 0  # of the handle, when it was looked at
        self._next_try = 0.0
        self._wait = RETRY_S
        self._said = ""

    @property
    def is_open(self) -> bool:
        """Whether there has been a daemon: client() does not block then."""
        return self._client is not None

    @property
    def handle(self) -> Optional[Client]:
        """The handle as it is, if there is one."""
        return self._client

    def client(self) -> Optional[Client]:
        """The handle, or None while there is no daemon. Does not block where nobody listens; else
        the first time, up to CONNECT_TIMEOUT_MS."""
        if self._client is not None:
            self._look_again(self._client)
        if self._client is None and time.monotonic() >= self._next_try:
            try:
                client = Client(connect_timeout_ms=CONNECT_TIMEOUT_MS, **self._options)
                self._check(client)
                self._client, self._link, self._said = client, client.link() or 0, ""
                for line in self._early:
                    self._warn(line)
            except SessionError as error:
                slow = error.status == Status["ERR_TIMEOUT"]
                self._wait = min(2 * self._wait, RETRY_MAX_S) if slow else RETRY_S
                self._say(f"no daemon: {error}; requests are computed until there is one")
            except KvferryError as error:
                self._say(NOT_TAKEN + str(error))
            self._early.clear()
            self._next_try = time.monotonic() + self._wait
        return self._client

    def _look_again(self, client: Client) -> None:
        """Another daemon may have another profile in force."""
        link = client.link()
        if link is None or link == self._link:
            return
        self._link = link
        try:
            self._check(client)
        except KvferryError as error:
            self._client, self._next_try = None, time.monotonic() + self._wait
            self._say(NOT_TAKEN + str(error))

    def _check(self, client: Client) -> None:
        try:
            self._on_open(client)
        except KvferryError:
            client.close()
            raise

    def _say(self, line: str) -> None:
        """A warning, once while nothing else happens."""
        if line != self._said:
            self._said = line
            self._warn(line)

    def close(self) -> None:
        """Close the handle; client() opens no other one."""
        self._next_try = float("inf")
        if self._client is not None:
            self._client.close()
            self._client = None
