"""A sink hears of a layer when the device has written it, and the step does not wait for that."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.run.layer_pushes import LayerPushes
from tests.engine.layer_sinks import LAYOUT, PUSHES, Sink

WAIT_S = 10.0
HUNG_DEVICE = """
import threading
from engine.run.layer_pushes import LayerPushes
from tests.engine.layer_sinks import LAYOUT, PUSHES, Sink

class Never:
    def record(self): pass
    def synchronize(self): threading.Event().wait()

pushes = LayerPushes(Sink(), LAYOUT, Never)
done = pushes.of_step(PUSHES)
assert done is not None
done(0)
pushes.close()
"""


class Device:
    """Computes when it is let: as many layers as were asked for, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def new_event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.reached = threading.Event()

    def record(self) -> None:
        self._device.events.append(self)

    def synchronize(self) -> None:
        assert self.reached.wait(WAIT_S), "nobody computes"


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    for event in device.events:
        event.reached.set()  # a thread that waits would outlive its test


def test_a_step_asks_for_all_layers_while_the_sink_hears_of_each_that_is_written(
    device: Device,
) -> None:
    sink = Sink()
    pushes = LayerPushes(sink, LAYOUT, device.new_event)
    layer_done = pushes.of_step(PUSHES)
    assert layer_done is not None
    for layer in range(3):
        layer_done(layer)  # waits for none of them
    assert sink.calls == []
    expected = [("layer_done", layer, PUSHES[min(layer, 1) :][:1]) for layer in range(3)]
    for layer, event in enumerate(device.events):
        event.reached.set()
        assert sink.heard.acquire(timeout=WAIT_S)
        assert sink.calls == expected[: layer + 1]
    pushes.finish(is_read_back=True)
    pushes.close()


def test_a_step_finishes_when_the_sink_has_heard_of_every_layer(device: Device) -> None:
    sink = Sink()
    pushes = LayerPushes(sink, LAYOUT, device.new_event)
    layer_done = pushes.of_step(PUSHES)
    assert layer_done is not None
    for layer in range(3):
        layer_done(layer)

    def finish() -> None:
        pushes.finish(is_read_back=True)
        sink.calls.append(("finished",))

    finishing = threading.Thread(target=finish)
    finishing.start()
    for event in device.events:
        event.reached.set()
    finishing.join(WAIT_S)
    assert [call[0] for call in sink.calls] == ["layer_done"] * 3 + ["finished"]
    pushes.close()


def test_what_a_sink_raises_is_the_steps_error(device: Device) -> None:
    pushes = LayerPushes(Sink(fails_at=1), LAYOUT, device.new_event)
    layer_done = pushes.of_step(PUSHES)
    assert layer_done is not None
    for layer in range(3):
        layer_done(layer)
    for event in device.events:
        event.reached.set()
    with pytest.raises(ValueError, match="layer 1"):
        pushes.finish(is_read_back=True)
    pushes.close()


def test_a_step_without_pushes_records_nothing(device: Device) -> None:
    sink = Sink()
    pushes = LayerPushes(sink, LAYOUT, device.new_event)
    assert pushes.of_step(()) is None
    pushes.finish(is_read_back=True)
    pushes.close()
    assert (device.events, sink.calls) == ([], [])


def test_a_step_that_nobody_reads_back_ends_when_the_device_has_written_all(device: Device) -> None:
    pushes = LayerPushes(Sink(), LAYOUT, device.new_event)
    ended = threading.Event()

    def step() -> None:
        assert pushes.of_step(()) is None
        pushes.finish(is_read_back=False)
        ended.set()

    stepping = threading.Thread(target=step)
    stepping.start()
    give_up_at = time.monotonic() + WAIT_S
    while not device.events and time.monotonic() < give_up_at:
        ended.wait(0.001)
    assert len(device.events) == 1
    assert not ended.is_set()
    device.events[0].reached.set()
    assert ended.wait(WAIT_S)
    stepping.join()
    pushes.close()


def test_an_interpreter_ends_while_a_device_hangs() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", HUNG_DEVICE], cwd=root, check=True, timeout=60)
