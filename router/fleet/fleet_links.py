"""Bring the registry's view of the fleet and this router's connections together.

The registry reports who exists; the connection shows who answers. A worker that the registry no
longer names is kept as long as it answers: a restarted registry fills up again. A worker that it
calls GONE is dropped at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.config.router import RouterConfig
from baton.fleet import WorkerState
from baton.identity.identity import Identity
from router.fleet.fleet import Fleet, ReportedLoad, RolesAway, WorkerEntry
from router.fleet.session import RouterIdentity
from router.fleet.worker_facts import WorkerFacts
from router.fleet.worker_link import WorkerLink
from router.index.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerReport:
    """One worker as the registry reports it."""

    facts: WorkerFacts
    state: WorkerState
    load: ReportedLoad
    prefills: bool = True
    """Whether it gets new prompts to prefill for others, if it can."""
    decodes: bool = True
    """Whether it gets new requests to decode, if it can."""


@dataclass(frozen=True)
class FleetReport:
    """The whole fleet as the registry sees it now."""

    workers: Sequence[WorkerReport]
    away: RolesAway = RolesAway()  # noqa: RUF009
    settles: bool = False
    """The registry has just started: some workers have yet to register with it again."""
    model_fingerprint: bytes = b""
    """The served model's; empty: no worker has registered."""


class FleetLinks:
    """Own one link per worker of the fleet."""

    def __init__(
        self,
        config: RouterConfig,
        identity: RouterIdentity,
        fleet: Fleet,
        index: PrefixIndex,
        model_name: str,
        own: Identity,
    ) -> None:
        """`own`: who this process is to workers."""
        self._config, self._identity, self._own = config, identity, own
        self._fleet, self._index, self._model_name = fleet, index, model_name
        self._links: dict[str, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._reported, self._settles = asyncio.Event(), False
        self.refused: set[str] = set()
        self.end_request: Callable[[str], bool] = lambda wire_id: False

    def __iter__(self) -> Iterator[WorkerLink]:
        return iter(list(self._links.values()))

    def get(self, entry: WorkerEntry) -> WorkerLink | None:
        link = self._links.get(entry.facts.worker_id)
        return link if link is not None and link.entry is entry else None

    def at(self, entry: WorkerEntry) -> WorkerLink:
        """Return the link to a worker of the fleet."""
        return self._links[entry.facts.worker_id]

    def find(self, worker_id: str, incarnation: int) -> WorkerLink | None:
        """Return the link to this start of a worker, while it is connected."""
        link = self._links.get(worker_id)
        if link is None or link.entry.facts.incarnation != incarnation:
            return None
        return link if link.entry.connected else None

    def with_open_session(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.session.is_open]

    def cancel_everywhere(self, wire_id: str) -> None:
        """Abort a request that may run anywhere, whichever router follows it."""
        for link in self.with_open_session():
            link.session.cancel_every_attempt(wire_id)

    async def cancel_anywhere(self, wire_id: str, timeout_s: float) -> bool:
        """Abort it likewise, and return whether it ran anywhere."""
        asked = (link.cancel(wire_id, timeout_s) for link in self.with_open_session())
        return any(await asyncio.gather(*asked))

    def num_degraded(self) -> int:
        return sum(not link.kv.is_exact for link in self._links.values())

    @property
    def are_all_known(self) -> bool:
        """The registry has reported a fleet, and does not settle any more."""
        return self._reported.is_set() and not self._settles

    async def wait_reported(self) -> None:
        """Wait until the registry has reported a fleet."""
        await self._reported.wait()

    async def wait_tried(self, timeout_s: float) -> None:
        """Wait until the fleet is known and every link has been tried once, or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._reported.wait()
                for link in list(self._links.values()):
                    await link.tried.wait()
        except TimeoutError:
            log.info("not every worker answered within %.1f s", timeout_s)

    # --- what the registry reports -------------------------------------------------------------

    def update(self, fleet: FleetReport) -> None:
        self._fleet.away = fleet.away
        self._settles = fleet.settles
        listed = set()
        self.refused &= {report.facts.worker_id for report in fleet.workers}
        for report in fleet.workers:
            if report.facts.model == self._model_name:
                listed.add(report.facts.worker_id)
                self._update_one(report)
            elif report.facts.worker_id not in self.refused:
                self.refused.add(report.facts.worker_id)
                log.warning(
                    "worker %s runs %r: not used", report.facts.worker_id, report.facts.model
                )
        for worker_id, link in list(self._links.items()):
            if worker_id not in listed:
                self._unlist(link)
        self._reported.set()

    def _update_one(self, report: WorkerReport) -> None:
        facts = report.facts
        link = self._links.get(facts.worker_id)
        if (
            link is not None
            and link.entry.connected  # else the registry knows better: clocks can be set back
            and link.entry.facts.incarnation > facts.incarnation
        ):
            return
        if link is not None and link.entry.facts.incarnation != facts.incarnation:
            self._drop(link)
            link = None
        if report.state is WorkerState.GONE:
            if link is not None:
                self._drop(link)
            return
        if link is None:
            link = self._connect(facts)
        if link.entry.state is not report.state:
            self._fleet.set_state(link.entry, report.state)
            link.review_waiting()
        self._fleet.set_roles(link.entry, report.prefills, report.decodes)
        self._fleet.report(link.entry, report.load)

    def _connect(self, facts: WorkerFacts) -> WorkerLink:
        entry = self._fleet.add(facts)
        link = WorkerLink(
            entry, self._config, self._identity, self._index, self._on_connected, self._own
        )
        link.session.end_request = self.end_request
        self._links[facts.worker_id] = link
        link.start()
        return link

    def _on_connected(self, entry: WorkerEntry, connected: bool) -> None:
        self._fleet.set_connected(entry, connected)
        link = self.get(entry)
        if not connected and link is not None and entry.state is WorkerState.UNLISTED:
            self._drop(link)

    def _unlist(self, link: WorkerLink) -> None:
        if link.entry.connected:
            if link.entry.state is not WorkerState.UNLISTED:
                self._fleet.set_state(link.entry, WorkerState.UNLISTED)
        else:
            self._drop(link)

    def _drop(self, link: WorkerLink) -> None:
        entry = link.entry
        del self._links[entry.facts.worker_id]
        self._fleet.remove(entry)
        link.stop("the worker has left the fleet")
        self._index.clear(entry.slot)
        self._index.forget_predictions(entry.slot)
        closing = asyncio.create_task(link.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)
