"""Report each layer that a step has written to a sink. The step's thread does not wait.

A device computes asynchronously: a launched layer need not be written yet, but a put reads its
memory at once. So an event is recorded on the device after each layer. A separate thread waits for
one event after the other and calls the sink. The step ends when the sink has all layers. A sink's
calls never overlap, and its errors become the step's.

A step also ends only when all its KV is written, even if none is pushed. Its blocks may then be
freed and leased to a writer that nothing orders behind this device's work.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.api import KvSink
from engine.request import BlockPush
from kv_transfer.layout import KvLayout


class DeviceEvent(Protocol):
    """The part of torch.cuda.Event that is used."""

    def record(self) -> None:
        """On the step's thread: record the event, which happens once all work so far is done."""

    def synchronize(self) -> None:
        """On any thread: wait for it."""


NewEvent = Callable[[], DeviceEvent]


def _new_cuda_event() -> DeviceEvent:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class LayerPushes:
    """Serves one step at a time: `layer_done` for each layer, on one thread, then `finish`."""

    def __init__(self, sink: KvSink, layout: KvLayout, new_event: NewEvent | None) -> None:
        """`new_event` is None if a layer is written when its call returns."""
        self._sink = sink
        self._layout = layout
        self._new_event = new_event
        self._reported: list[Future[None]] = []
        self._written: queue.SimpleQueue[_Written | None] = queue.SimpleQueue()
        if new_event is not None:
            # A daemon: an executor's thread is waited for when the interpreter ends, and an event
            # of a device that hangs never comes to pass.
            threading.Thread(target=self._run, name="layer-pushes", daemon=True).start()

    @classmethod
    def on(cls, device: torch.device, sink: KvSink, layout: KvLayout) -> LayerPushes:
        """Make pushes for a device. A thread that waits for a CUDA event sleeps: polling would take
        a core."""
        return cls(sink, layout, _new_cuda_event if device.type == "cuda" else None)

    def of_step(self, pushes: Sequence[BlockPush]) -> Callable[[int], None] | None:
        """What to call after each layer is launched; None if the step pushes nothing."""
        assert not self._reported, "the step before has not finished"
        if not pushes:
            return None
        of_group = [
            [push for push in pushes if push.group == group]
            for group in range(len(self._layout.groups))
        ]

        def layer_done(layer: int) -> None:
            self._layer_done(layer, of_group[self._layout.group_of_layer(layer)])

        return layer_done

    def finish(self, *, is_read_back: bool) -> None:
        """Wait until the sink has every layer. Raises its first error.

        `is_read_back`: the caller reads the step's logits, and so waits for the device itself.
        """
        if self._new_event is not None and not is_read_back:
            event = self._new_event()
            event.record()
            event.synchronize()
        reported, self._reported = self._reported, []
        for each in reported:
            each.result()

    def close(self) -> None:
        """End without waiting: the events of a hung device never happen."""
        self._written.put(None)

    def _layer_done(self, layer: int, pushes: Sequence[BlockPush]) -> None:
        if self._new_event is None:
            self._sink.layer_done(layer, pushes)
            return
        event = self._new_event()
        event.record()
        written = _Written(event, layer, pushes)
        self._reported.append(written.reported)
        self._written.put(written)

    def _run(self) -> None:
        while (written := self._written.get()) is not None:
            try:
                written.event.synchronize()
                self._sink.layer_done(written.layer, written.pushes)
            except BaseException as error:  # noqa: BLE001 - the step raises it
                written.reported.set_exception(error)
            else:
                written.reported.set_result(None)


@dataclass(frozen=True)
class _Written:
    """A layer that the sink gets once its event has happened."""

    event: DeviceEvent
    layer: int
    pushes: Sequence[BlockPush]
    reported: Future[None] = field(default_factory=Future)
