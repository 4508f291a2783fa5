"""An informer for tests, and what its handler hears."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator

from baton.pacing import Backoff
from deploy.controller.kit.informer import Informer, InformerSettings
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import EVERYTHING, Key, Selection
from deploy.controller.kit.watch_stream import Window
from tests.deploy.controller.things import CONFIG_MAPS

TIMEOUT_S = 10.0
FAST = InformerSettings(Window(watch_s=1, grace_s=0.5), Backoff(first_s=0.02, longest_s=0.1))


class Heard:
    """What a handler was told, in its order."""

    def __init__(self, informer: Informer) -> None:
        self.informer = informer
        self._keys: queue.Queue[Key] = queue.Queue()
        informer.add_handler(self._keys.put)

    def next(self, timeout_s: float = TIMEOUT_S) -> str:
        return self._keys.get(timeout=timeout_s).name

    def until_data_is(self, key: Key, data: dict[str, str] | None) -> None:
        """Until the cache shows it, None: no such object; it must be told of each step to it."""
        give_up_at = time.monotonic() + TIMEOUT_S
        while True:
            obj = self.informer.get(key)
            if (None if obj is None else obj.get("data")) == data:
                return
            try:
                self._keys.get(timeout=max(0.0, give_up_at - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{key} is {obj}, not {data}") from None

    def rest(self) -> list[str]:
        """What was told and not asked for."""
        names = []
        with contextlib.suppress(queue.Empty):
            while True:
                names.append(self._keys.get_nowait().name)
        return names


@contextlib.contextmanager
def following(
    kube: Kube,
    selection: Selection = EVERYTHING,
    settings: InformerSettings = FAST,
    *,
    is_of_others: bool = False,
) -> Iterator[Heard]:
    informer = Informer(kube, CONFIG_MAPS, selection, settings, is_of_others=is_of_others)
    heard = Heard(informer)
    informer.start()
    try:
        yield heard
    finally:
        assert informer.stop()


def until(happened: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Poll what no event tells of."""
    give_up_at = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < give_up_at, f"{what}: not within {timeout_s} s"
        time.sleep(0.005)
