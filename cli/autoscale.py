"""`baton up --autoscale`: the planner's hand on the pools of one machine.

A thread follows the registry, plans with every answer and tells the registry what pools should be.
A registry that is gone is tried again; nothing is scaled meanwhile. Where the machine has no room
for what the planner wishes, the pool gets what there is room for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from baton.config.planner import PlannerConfig
from baton.control_client import ControlClient
from baton.errors import BatonError, NoCapacityError
from baton.v1 import control_pb2
from cluster.planner.fleet_signals import FleetSignals, PoolBounds
from cluster.planner.planner import PoolPlan, decide
from cluster.planner.state import PlannerState
from cluster.pools.role_plan import RolePlan

log = logging.getLogger(__name__)

_WINDOW_S = 30.0
_RETRY_S = 1.0
_END_WITHIN_S = 5.0
_ITSELF = "the autoscaler"


class Autoscaler:
    """Own the thread and what the planner remembers."""

    def __init__(
        self,
        control: str,
        bounds: Mapping[str, PoolBounds],
        config: PlannerConfig,
        tell: Callable[[str], None] = log.info,
    ) -> None:
        """`bounds`: of the pools that are scaled; `tell` hears of every change, in words."""
        self._client = ControlClient(control)
        self._bounds, self._config, self._tell = bounds, config, tell
        self._signals = FleetSignals()
        self._state = PlannerState()
        self._warned: dict[str, str] = {}
        """What was last logged of each pool, and of the planner itself, and is not over yet."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
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
            except Exception as error:  # noqa: BLE001 - a fault of its own, or a closed channel
                # Pools stay as they are until it is over, not for good.
                self._warn(_ITSELF, repr(error), error)
            self._stopping.wait(_RETRY_S)

    def _warn(self, of: str, text: str, fault: Exception | None = None) -> None:
        """Logged once: it comes again with each second that changes nothing. What comes of the
        channel's own end is not."""
        if self._warned.get(of) != text and not self._stopping.is_set():
            self._warned[of] = text
            log.warning("%s: %s", of, text, exc_info=fault)

    def _plan(self, fleet: control_pb2.WatchFleetResponse) -> None:
        signals = self._signals.take(fleet, self._bounds, time.monotonic())
        self._state, plan = decide(self._state, signals, self._config)
        for pool in signals.pools:
            self._apply(pool.name, pool.desired_replicas, pool.role_plan, plan.pools[pool.name])

    def _apply(self, pool: str, replicas: int, roles: RolePlan, plan: PoolPlan) -> None:
        """What the registry refuses is told, and asked for again with the next."""
        try:
            if plan.role_plan is not None and plan.role_plan != roles:
                self._client.set_role_plan(pool, plan.role_plan.prefill, plan.role_plan.decode)
                self._tell(plan.reason)
            if plan.desired_replicas != replicas:
                self._resize(pool, replicas, plan)
            else:
                self._warned.pop(pool, None)
        except BatonError as error:
            self._warn(pool, error.message)

    def _resize(self, pool: str, replicas: int, plan: PoolPlan) -> None:
        """To the size nearest to the plan's that there is room for. Raises BatonError."""
        wanted = plan.desired_replicas
        for size in range(wanted, replicas, -1) if wanted > replicas else (wanted,):
            try:
                self._client.set_replicas(pool, size)
            except NoCapacityError as error:
                if size == wanted:
                    self._warn(pool, error.message)
                continue
            self._tell(plan.reason if size == wanted else f"{plan.reason}; room for {size}")
            return
