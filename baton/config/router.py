"""The router's settings. Standard library only; checked once, when they are made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from baton.config.ranges import Count, NotNegative, Port, Positive, Ranged, Whole, between

LocalPrefill = Literal["auto", "never", "always"]
ToolCalls = Literal["auto", "hermes", "llama3", "mistral", "none"]
Reasoning = Literal["auto", "think", "none"]

_Fraction = Annotated[float, between(0, 1)]
# gRPC counts milliseconds in 31 bits, and bytes.
_Keepalive = Annotated[Positive, between(0, 86_400)]
_MessageBytes = Annotated[int, between(1, (1 << 31) - 1)]


@dataclass(frozen=True)
class TlsConfig:
    """TLS at a router's port. The files are PEM, and read again when they change."""

    certificate_file: str
    """The router's certificate, with those of the authorities between it and the root."""
    key_file: str
    client_ca_file: str | None = None
    """Where given, clients must show a certificate that one of these authorities has signed."""


@dataclass(frozen=True)
class AuthConfig:
    """Who may call a router: clients with a tenant's token, in that tenant's name alone."""

    tokens: str
    """A folder with a file for each tenant, named as the tenant, that holds its bearer tokens; or a
    YAML file that maps tenants to tokens. Read again when it changes. A tenant may have several
    tokens, one a line, so that it can change over. In the YAML file they may be a mapping:
    `tokens`, and the tenant's own of `router.limits`. A folder's files named *.yaml are read so."""
    operators: tuple[str, ...] = ()
    """Tenants whose tokens open the metrics port and its page, and show the whole fleet."""


@dataclass(frozen=True)
class TenantLimits(Ranged):
    """What a tenant may ask for."""

    most_urgent_priority: Annotated[int, between(-(1 << 31), (1 << 31) - 1)] = 0
    """A priority orders a tenant's own requests, the lowest first. Among others' it counts as 0, or
    as less down to this. Above 0: all of the tenant's requests count as this, and go last."""
    default_max_tokens: Count | None = None
    """Output tokens of a request that names none; None: `largest_max_tokens`."""
    largest_max_tokens: Count | None = None
    """Requests for more are refused; None: what fits the context."""

    def urgency(self, priority: int) -> int:
        """What a request's priority counts as among other tenants' requests."""
        return max(self.most_urgent_priority, min(priority, 0))


def _beside(part: Any, folder: Path) -> Any:
    """Return a part with the relative files that it names put into `folder`."""
    if part is None:
        return None
    files = {name: file for name, file in vars(part).items() if isinstance(file, str)}
    return dataclasses.replace(part, **{name: str(folder / file) for name, file in files.items()})


@dataclass(frozen=True)
class HttpConfig(Ranged):
    """The OpenAI-compatible API over HTTP."""

    port: Port | None = 8000
    """With the same TLS and tokens as gRPC. 0: any free port; None: not served."""
    origins: tuple[str, ...] = ()
    """Web pages of these origins may call it from a browser (CORS). `*`: of all."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which it may be called where it listens on loopback without tokens. Else a
    web page could call it by a name that leads to this machine (DNS rebinding)."""
    read_timeout_s: Positive = 60.0
    """How long a request may take to come in, its body included."""


@dataclass(frozen=True)
class MetricsConfig(Ranged):
    """Prometheus metrics and a page for operators, over HTTP."""

    port: Port | None = None
    """None: not served. With `auth` they want a token of `auth.operators`, as bearer token or as
    Basic authentication's password."""
    host: str = "127.0.0.1"
    tenants: Whole = 20
    """Tenants that metrics tell apart, the first that come; all others are "other"."""
    vllm_names: bool = False
    """The metrics that vLLM has too are served under its names as well, for dashboards of it."""
    ttft_target_s: Positive = 2.0
    """When the first token of a good request has come, where it names no target itself. It is
    counted as met or missed, and changes nothing."""
    itl_target_s: Positive = 0.1
    """The target of the mean gap between its tokens, likewise."""


@dataclass(frozen=True)
class TracesConfig(Ranged):
    """OpenTelemetry's traces. They need the extra `traces`."""

    endpoint: str | None = None
    """A collector, OTLP over HTTP: http://collector:4318. None: as OTEL_EXPORTER_OTLP_ENDPOINT
    says; without it there are none."""
    ratio: _Fraction = 1.0
    """Share of requests that are traced; one with a `traceparent` is as its flag says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.endpoint or "http://").startswith(("http://", "https://")):
            raise ValueError("endpoint must be a URL of http or https")


@dataclass(frozen=True)
class AnswersConfig:
    """How answers are read and what they may hold."""

    tool_calls: ToolCalls = "auto"
    """How the model writes its calls of tools: hermes (Qwen too), llama3 or mistral. auto: as its
    chat template shows; none: as text."""
    reasoning: Reasoning = "auto"
    """Whether the model thinks between <think> and </think>, which HTTP returns apart from the
    answer. auto: as its chat template shows."""
    close_objects: bool = True
    """An object of a JSON schema that lists its properties and says nothing of others has no
    others, as if with `additionalProperties: false`. So have the arguments of tools."""


@dataclass(frozen=True)
class ClientsConfig(Ranged):
    """What clients may take of a router's memory, and how long it keeps what they left."""

    max_connections: Count = 4096
    """Clients' connections, gRPC's and HTTP's together. A further one takes the place of the oldest
    without a request; if there is none it is closed at once. Never more than the process may have
    open files."""
    max_message_bytes: _MessageBytes = 32 << 20
    """Longest message over gRPC, clients' and the registry's."""
    max_request_bytes: _MessageBytes | None = None
    """Of one request as it comes in. None: 4 MiB, or 48 for each token of the model's context where
    that is more (8 for its text, times 6 if JSON escapes every character), and at most
    `max_message_bytes`."""
    max_unfinished_bytes: Count = 256 << 20
    """Requests that have begun to arrive, over gRPC and HTTP together. Beyond it the one that began
    first is refused as OVERLOADED."""
    max_unread_bytes: Count = 4 << 20
    """Output of one request that its client has not read, in memory. A client with more is cut off
    as OVERLOADED; one that named its request may come back for it."""
    resume_window_s: NotNegative = 30.0
    """How long a request runs on after its client vanished, and how long a finished one is
    remembered."""
    max_remembered_bytes: Whole = 256 << 20
    """Output of finished requests that is remembered; beyond it the oldest is forgotten first."""


@dataclass(frozen=True)
class AdmissionConfig(Ranged):
    """The lines in which requests wait: for the tokenizer, then for a placement."""

    max_queue: Count = 4096
    """Requests waiting for a placement; more are refused as OVERLOADED."""
    max_tokenizing: Count = 4096
    """Requests that may wait to be tokenized, which comes before the wait for a placement."""
    max_tokenizing_bytes: Count = 128 << 20
    """Bytes of the messages that may wait so. A larger message is taken when it is alone."""
    lease_lead_s: NotNegative = 0.05
    """A prompt leaves the queue only when its prefill is predicted to start within this time."""
    max_bypass_s: NotNegative = 1.0
    """A request that has waited this long keeps the decode workers that it could use from
    others."""
    fleet_wait_s: NotNegative = 10.0
    """How long a request waits while no usable worker takes it, without a break."""
    overload_retry_s: NotNegative = 1.0
    """The delay in `RetryInfo` of a refused request."""


@dataclass(frozen=True)
class RetriesConfig(Ranged):
    """What follows a failed attempt. Each retry draws on a bucket of the router and on one of its
    tenant."""

    max_attempts: Count = 6
    """Tries of one request, the first included."""
    max_dead_decode_workers: Count = 2
    """A request that was running on this many workers that died is refused as POISON."""
    burst: Whole = 1000
    refill_per_s: NotNegative = 50.0
    tenant_burst: Whole = 500
    tenant_refill_per_s: NotNegative = 25.0
    backoff_s: NotNegative = 0.05
    """Wait before the second retry and later ones."""
    eject_s: NotNegative = 2.0
    """A worker that failed a request gets nothing for this long while others can serve."""


@dataclass(frozen=True)
class TimeoutsConfig(Ranged):
    """How long requests may take, and how long a router waits for workers."""

    default_s: Positive = 600.0
    """Deadline of a request that names none."""
    max_s: Positive = 3600.0
    """Longest deadline of any request."""
    reserve_s: Positive = 5.0
    """Longest wait for a decode worker's answer to `Reserve`."""
    first_token_s: Positive = 150.0
    """Longest wait for a first token beyond the prediction by its worker's newest measure. It
    exceeds what the registry allows a step that nothing predicts (`registry.first_step_s`): a
    worker whose step hangs is SUSPECT long before."""
    token_s: Positive = 30.0
    """Longest gap between tokens before a request is moved. It stays if its worker is not SUSPECT
    and serves others meanwhile: it was preempted there, or its prompt waits its turn."""
    suspect_silence_s: NotNegative = 1.5
    """Longest silence of a worker that the registry calls SUSPECT: stuck or silent itself."""
    reattach_s: NotNegative = 1.0
    """How long a lost session may take to come back before its requests go elsewhere."""
    attach_s: NotNegative = 3.0
    """Longest search for a request that another router started."""
    handoff_report_s: NotNegative = 0.25
    """How long a finished request waits for its handoff's figures."""

    def of_request(self, named_s: float | None) -> float:
        """How long a request with this timeout, or with none, may take."""
        return min(named_s or self.default_s, self.max_s)


@dataclass(frozen=True)
class LinksConfig(Ranged):
    """Connections to workers and to the registry."""

    keepalive_s: _Keepalive = 2.0
    """Ping interval to workers; a host that does not answer for as long again is lost."""
    registry_silence_s: Positive = 5.0
    """The registry reports about once a second. After this long without a report the router asks
    anew."""
    connect_timeout_s: Positive = 5.0
    reconnect_min_s: Positive = 0.1
    reconnect_max_s: Positive = 2.0
    max_unsent_bytes: Count = 64 << 20
    """Bytes that a worker may leave unread before it counts as hung."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError(
                f"reconnect_min_s must be at most reconnect_max_s ({self.reconnect_max_s}), "
                f"not {self.reconnect_min_s}"
            )


@dataclass(frozen=True)
class PlacementConfig(Ranged):
    """What running a prompt on a worker is thought to cost."""

    local_prefill: LocalPrefill = "auto"
    """auto, never or always: may a decode worker prefill by itself."""
    local_prefill_weight: NotNegative = 2.0
    """A second of prefill on a decode worker costs this many seconds, since streams stall behind
    it."""
    explore_share: _Fraction = 1 / 64
    """Share of placements that do not trust old measures of a worker's speed."""
    trust_rates_s: NotNegative = 30.0
    """How long these trust a measure. A worker with an older one counts as the best."""
    decode_growth_tokens: Whole = 128
    """Output tokens for which room is set aside on a decode worker, at most the request's own
    limit."""
    prediction_ttl_s: NotNegative = 5.0
    """How long a placed prompt's blocks count as cached before the worker's events say so."""
    public_prefix: str = ""
    """Text that prompts of all tenants may begin with, such as a common system message. Its whole
    blocks are cached once for all tenants. All else is cached for each tenant apart: a tenant could
    probe for what others asked by how fast a prompt is answered."""


@dataclass(frozen=True)
class RouterConfig(Ranged):
    """Settings of one router, grouped by what they tune. All times are in seconds."""

    host: str = "127.0.0.1"
    port: Port = 7100
    """The port for gRPC. 0: any free port."""
    health_port: Port | None = None
    """A further port for the health service, in plain text and open to all: probes have no
    certificate. The router's own port serves health in any case. None: only there."""
    reuse_port: bool = False
    """Several router processes share one port."""
    drain_timeout_s: NotNegative = 30.0
    """How long running requests may go on once the router is told to stop."""
    tls: TlsConfig | None = None
    """None: plain text."""
    auth: AuthConfig | None = None
    """None: everyone may call, in any tenant's name."""
    limits: TenantLimits = field(default_factory=TenantLimits)
    """What a tenant may ask for, where `auth.tokens` says nothing else."""
    http: HttpConfig = field(default_factory=HttpConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    clients: ClientsConfig = field(default_factory=ClientsConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    retries: RetriesConfig = field(default_factory=RetriesConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    links: LinksConfig = field(default_factory=LinksConfig)

    @property
    def secret_files(self) -> list[Path]:
        """Files and folders that nobody else should be able to read."""
        key = None if self.tls is None else self.tls.key_file
        tokens = None if self.auth is None else self.auth.tokens
        return [Path(name) for name in (key, tokens) if name is not None]

    def beside(self, folder: Path) -> RouterConfig:
        """Return the settings with relative files put into `folder`."""
        tls, auth = _beside(self.tls, folder), _beside(self.auth, folder)
        return dataclasses.replace(self, tls=tls, auth=auth)
