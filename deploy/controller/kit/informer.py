"""A kind's objects, followed: list, then watch, for as long as the process lives.

1. List: as etcd has it now. Handlers hear of what is new, changed or gone; `wait_synced` ends.
2. Watch from the list's resourceVersion, in windows of `Window.watch_s`; each event's and each
   bookmark's resourceVersion is where the next window begins.
3. A window that broke or went silent: wait (back-off), then the next one begins where it ended.
   Nothing is missed: the server sends all that happened since.
4. The server refuses to go on from there (410: too old, as an answer or as an event; a server that
   was set back; no permission): wait, then list again. What was deleted meanwhile is missing from
   the list, and so it is noticed.
5. A kind that others install and the server does not serve has no objects, until a list finds it
   served. Two lists in a row have to say so: one may be a bad moment of a server's, or a proxy's.

Handlers hear keys only, on the informer's thread, and must not block: they add to a work queue. A
reconciler reads a key's newest state from here, however many changes led to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from baton.pacing import Backoff
from deploy.controller.kit.errors import KubeError, NotFoundError, StatusError, UnreachableError
from deploy.controller.kit.kube import Kube, Listing
from deploy.controller.kit.objects import (
    EVERYTHING,
    Key,
    Object,
    Resource,
    Selection,
    key_of,
    resource_version_of,
)
from deploy.controller.kit.watch_stream import WatchEvent, WatchEventType, WatchStream, Window

log = logging.getLogger(__name__)

Handler = Callable[[Key], None]
KeysOf = Callable[[Object], Iterable[Key]]

_STOP_S = 1.0
_SHORTEST_WATCH_S = 1.0
"""A server that ends a window sooner, without an event, would be asked again and again."""


Change = tuple[Object, ...]
"""An object's states before and after: one where it is new or gone."""


class Cache:
    """Own the newest known state of each object. The informer writes, others read, and change
    nothing. `metadata.managedFields` is left out: it is half of an object, and no reconciler needs
    it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[Key, Object] = {}

    def get(self, key: Key) -> Object | None:
        with self._lock:
            return self._objects.get(key)

    def snapshot(self) -> Mapping[Key, Object]:
        """Return all objects at one moment; what happens later does not show in it."""
        with self._lock:
            return MappingProxyType(dict(self._objects))

    def replace(self, listing: Listing) -> list[Change]:
        """Take in a list and return what it changes: what it lacks is gone."""
        objects = {key_of(item): _kept(item) for item in listing.items}
        with self._lock:
            before, self._objects = self._objects, objects
        gone = [key for key in before if key not in objects]
        changes = [_change(before.get(key), objects.get(key)) for key in (*gone, *objects)]
        return [change for change in changes if change]

    def follow(self, event: WatchEvent) -> Change:
        """Take in a watch's event; empty where nothing has changed."""
        assert event.type is not WatchEventType.BOOKMARK
        key = key_of(event.object)
        after = None if event.type is WatchEventType.DELETED else _kept(event.object)
        with self._lock:
            before = self._objects.pop(key, None)
            if after is not None:
                self._objects[key] = after
        return _change(before, after)


def _change(before: Object | None, after: Object | None) -> Change:
    states = tuple(state for state in (before, after) if state is not None)
    is_same = len(states) == 2 and len({resource_version_of(state) for state in states}) == 1
    return () if is_same else states


def _kept(obj: Object) -> Object:
    metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    return {**obj, "metadata": metadata}


@dataclass(frozen=True)
class InformerSettings:
    """How an informer follows. With the defaults a cut is noticed within 25 s, and made up for at
    most `backoff.longest_s` after the server could answer."""

    window: Window = field(default_factory=Window)
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.5, longest_s=10.0))


_USUAL = InformerSettings()
_NOTHING = Listing((), "")


class Informer:
    """Own the cache of one selection and the thread that follows it."""

    def __init__(
        self,
        kube: Kube,
        resource: Resource,
        selection: Selection = EVERYTHING,
        settings: InformerSettings = _USUAL,
        *,
        is_of_others: bool = False,
    ) -> None:
        """`is_of_others`: a kind that somebody else installs, before or after us, or never."""
        self._kube, self._resource, self._selection = kube, resource, selection
        self._settings, self._is_of_others = settings, is_of_others
        self._is_served, self._was_missing = True, False
        self._cache = Cache()
        self._handlers: list[tuple[Handler, KeysOf]] = []
        self._version: str | None = None
        """Where the next window begins; None: list first."""
        self._backoff = replace(settings.backoff)
        self._changes: deque[Change] = deque()
        self._synced = threading.Event()
        self._stopping = threading.Event()
        self._stream: WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"informer-{resource}", daemon=True)

    def add_handler(self, handler: Handler, keys_of: KeysOf = lambda obj: (key_of(obj),)) -> None:
        """Add a handler, before `start`. `keys_of` names the keys that it hears for an object: its
        own, or its owner's. It is asked for the states before and after a change, so that an owner
        who lost an object hears of it, too."""
        assert not self._thread.is_alive(), "handlers are added before the start"
        self._handlers.append((handler, keys_of))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Call no handler any more. Takes a second at most; False where the thread still waits for
        a silent server. It ends by its own timeout and does nothing then."""
        self._stopping.set()
        if (stream := self._stream) is not None:
            stream.stop()
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()

    def wait_synced(self, timeout_s: float) -> bool:
        """Wait until the cache was complete once, and handlers have heard of all in it. Returns
        whether it was."""
        return self._synced.wait(timeout_s)

    @property
    def is_served(self) -> bool:
        """Tell whether the server knew a kind of others at one of the last two lists."""
        return self._is_served

    def get(self, key: Key) -> Object | None:
        return self._cache.get(key)

    def snapshot(self) -> Mapping[Key, Object]:
        return self._cache.snapshot()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except KubeError as error:
                if isinstance(error, StatusError):
                    self._version = None
                self._wait_after(error)
            except Exception as error:
                log.exception("%s: what handles a change has failed", self._resource)
                self._wait_after(error)

    def _follow(self) -> None:
        """List where need be, then watch for one window."""
        self._call_handlers()
        if self._version is None:
            self._version = self._list()
        self._call_handlers()
        self._synced.set()
        self._watch(self._version)

    def _list(self) -> str:
        """List the objects, and return the resourceVersion to watch from."""
        try:
            listing = self._kube.list(self._resource, self._selection)
        except NotFoundError:
            if self._is_of_others and self._was_missing:
                self._is_served = False
                self._changes.extend(self._cache.replace(_NOTHING))
                self._call_handlers()
                self._synced.set()
            self._was_missing = True
            raise
        self._is_served, self._was_missing = True, False
        self._changes.extend(self._cache.replace(listing))
        return listing.resource_version

    def _watch(self, version: str) -> None:
        began_at = time.monotonic()
        num_events = 0
        window = self._settings.window
        with self._kube.watch(self._resource, self._selection, version, window) as stream:
            # In this order: `stop` sets the one, then looks at the other.
            self._stream = stream
            if self._stopping.is_set():
                return
            for event in stream:
                if self._stopping.is_set():
                    return
                self._take(event)
                num_events += 1
                self._backoff.reset()
        if num_events == 0 and time.monotonic() - began_at < _SHORTEST_WATCH_S:
            raise UnreachableError(f"watch of {self._resource}: ended at once")
        self._backoff.reset()

    def _take(self, event: WatchEvent) -> None:
        if event.type is not WatchEventType.BOOKMARK:
            self._changes.append(self._cache.follow(event))
        self._version = resource_version_of(event.object)
        self._call_handlers()

    def _call_handlers(self) -> None:
        """Tell handlers of all changes. Where one fails, those behind come on the next round."""
        while self._changes:
            change = self._changes.popleft()
            for handler, keys_of in self._handlers:
                keys = dict.fromkeys(key for state in change for key in keys_of(state))
                for key in keys:
                    if not self._stopping.is_set():
                        handler(key)

    def _wait_after(self, error: Exception) -> None:
        if self._stopping.is_set():
            return
        delay_s = self._backoff.next_s()
        if isinstance(error, StatusError) and error.retry_after_s is not None:
            delay_s = max(delay_s, error.retry_after_s)
        then = "list again" if self._version is None else "watch on"
        log.warning("%s: %s: will %s in %.1f s", self._resource, error, then, delay_s)
        self._stopping.wait(delay_s)
