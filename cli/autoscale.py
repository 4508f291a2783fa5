"""`baton up --autoscale`: the planner scales the pools of one machine.

A thread follows the registry, plans with every answer and sets the pools' sizes. If the registry is
gone the thread tries again; nothing is scaled meanwhile. If the machine lacks room for a planned
size, the pool gets the size that fits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

from baton.config.planner import PlannerConfig
from baton.control.client import ControlClient
from baton.errors import BatonError, NoCapacityError
from baton.v1 import control_pb2
from cluster.planner.fleet_signals import FleetSignals, PoolBounds
from cluster.planner.needs import PlannerState
from cluster.planner.planner import PoolPlan, decide
from cluster.role_plan import RolePlan

log = logging.getLogger(__name__)

_WINDOW_S = 30.0
_RETRY_S = 1.0
_END_WITHIN_S = 5.0
_ITSELF = "the autoscaler"


class Autoscaler:
    """Own the thread and the planner's state."""

    def __init__(
        self,
        control: str,
        bounds: Mapping[str, PoolBounds],
        config: PlannerConfig,
        report: Callable[[str], None] = log.info,
    ) -> None:
        """Scale the pools that `bounds` names. `report` gets a line for every change."""
        self._client = ControlClient(control)
        self._bounds, self._config, self._report = bounds, config, report
        self._signals = FleetSignals()
        self._state = PlannerState()
        self._warned: dict[str, str] = {}
        """The last warning about each pool, and about the autoscaler itself, that still holds."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._client.close()
        self._thread.join(_END_WITHIN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                for fleet in self._client.watch_fleet(_WINDOW_S):
                    self._plan(fleet)
                    self._warned.pop(_ITSELF, None)
            except BatonError as error:
                log.debug("autoscaler: %s", error)
            except Exception as error:  # noqa: BLE001 - our fault, or a closed channel
                if not self._stopping.is_set():
                    self._warn(_ITSELF, f"it failed, pools stay as they are: {error!r}", error)
            self._stopping.wait(_RETRY_S)

    def _warn(self, of: str, text: str, fault: Exception | None = None) -> None:
        """Log a warning once: it would come again each second."""
        if self._warned.get(of) != text:
            self._warned[of] = text
            log.warning("%s: %s", of, text, exc_info=fault)

    def _plan(self, fleet: control_pb2.WatchFleetResponse) -> None:
        signals = self._signals.take(fleet, self._bounds, time.monotonic())
        self._state, plan = decide(self._state, signals, self._config)
        for pool in signals.pools:
            self._apply(pool.name, pool.desired_replicas, pool.role_plan, plan[pool.name])

    def _apply(self, pool: str, replicas: int, roles: RolePlan, plan: PoolPlan) -> None:
        """Log what the registry refuses, and ask for it again with the next plan."""
        try:
            if plan.role_plan is not None and plan.role_plan != roles:
                self._client.set_role_plan(pool, plan.role_plan.prefill, plan.role_plan.decode)
                self._report(plan.reason)
            if plan.desired_replicas != replicas:
                self._resize(pool, replicas, plan)
            else:
                self._warned.pop(pool, None)
        except BatonError as error:
            self._warn(pool, error.message)

    def _resize(self, pool: str, replicas: int, plan: PoolPlan) -> None:
        """Set the size nearest to the plan's that has room. Raises BatonError."""
        wanted = plan.desired_replicas
        for size in range(wanted, replicas, -1) if wanted > replicas else (wanted,):
            try:
                self._client.set_replicas(pool, size)
            except NoCapacityError as error:
                if size == wanted:
                    self._warn(pool, error.message)
                continue
            self._report(plan.reason if size == wanted else f"{plan.reason}; room for {size}")
            return
