"""`ServingCluster` (`serving`): one model, its routers and its pools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Literal

from baton.config import settings
from baton.config.cluster import LogFormat, LogLevel
from baton.config.engine import EngineConfig, EngineSettings, EngineTuning
from baton.config.planner import PlannerConfig, PlannerTargets, PlannerTuning
from baton.config.ranges import between, sized
from baton.config.router import RouterConfig
from baton.config.transfer import TransferConfig
from baton.config.workers import DecodeConfig, RegistryConfig, SupervisorConfig, WorkerSettings
from baton.errors import ConfigError
from baton.fleet import Role
from deploy.api.checked import AS_WRITTEN, Checked, Rule
from deploy.api.naming import (
    LABEL_KEY,
    NAMESPACED_NAME,
    OBJECT_NAME,
    Hostname,
    ObjectName,
    camel,
    respelt,
)
from deploy.api.pod_template import POD_TEMPLATE, PodSettings
from deploy.api.worker_pool import Duration, PoolTemplate, seconds

ZONE = "topology.kubernetes.io/zone"
POOL_NAME = r"^[a-z0-9]([-a-z0-9]{0,32}[a-z0-9])?$"
CLUSTER_NAME = "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"
"""The pattern of a cluster's name. It leaves room for a unit's code in the names of RayClusters."""
RAY_VERSION = (
    "^(2[.](5[2-9]|[6-9][0-9]|[1-9][0-9]{2})|([3-9]|[1-9][0-9])[.][0-9]+)([.][-+.0-9A-Za-z]+)?$"
)
"""The pattern of Ray's version, from 2.52: Ray has no token authentication before, and KubeRay
makes no pod then."""
CLAIMS_FOLDER = "/claims"
"""Where claims lie in every pod, each in a folder of its name."""
SOURCE = 2048
"""Most characters of a model's source."""
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "router": (
        "host",
        "port",
        "http.port",
        "metrics.port",
        "metrics.host",
        "health_port",
        "reuse_port",
        "traces.endpoint",
        "tls",
        "auth",
    ),
    "worker": ("port", "metrics_port", "metrics_host", "health_port"),
    "supervisor": ("drain_timeout_s",),
}
"""The settings that the operator sets itself."""


def without_operators(section: str, config: Any) -> Any:
    """Return a section's settings with the usual values of what the operator sets itself."""
    for name in OPERATORS.get(section, ()):
        field_name, _, inner = name.partition(".")
        usual = attrgetter(name)(type(config)())
        config = settings.changed(config, **{field_name: {inner: usual} if inner else usual})
    return config


@dataclass(frozen=True)
class ClaimSource(Checked):
    """A folder of a PersistentVolumeClaim, which every worker mounts read-only: of access mode
    ReadOnlyMany or ReadWriteMany, or ReadWriteOnce where all workers are on one node."""

    claim_name: ObjectName
    path: Annotated[str, sized(1024, r"^[^/.][^/]*(/[^/.][^/]*)*$")] | None = None
    """The model's folder, relative to the claim's root. None: the root itself."""

    @property
    def folder(self) -> str:
        """Return where the claim lies in every pod."""
        return f"{CLAIMS_FOLDER}/{self.claim_name}"


@dataclass(frozen=True)
class ModelSource(Checked):
    """Where the model comes from: exactly one of `name`, `claim` and `uri`."""

    name: Annotated[str, sized(1024, r"^\S")] | None = None
    """A name on the Hugging Face hub, or a folder that the worker's image holds."""
    claim: ClaimSource | None = None
    uri: Annotated[str, sized(SOURCE, r"^(s3|https)://[^/?#@]+/[^?#]+$")] | None = None
    """An s3:// or https:// folder that holds config.json, or a tar file of one. It is fetched once
    to each node's weights cache, and its files must not change: another version, another URI."""
    credentials_secret_name: ObjectName | None = None
    """A Secret that opens `uri`: its keys are environment variables, such as AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL for boto3, and BEARER_TOKEN for https."""
    revision: Annotated[str, sized(256, r"^[^/\s][^\s]*$")] | None = None
    """The branch, tag or commit of a model on the hub. None: its main branch."""

    rules = (
        Rule(
            "[has(self.name), has(self.claim), has(self.uri)].exists_one(given, given)",
            "name must be given, or claim or uri: exactly one of them",
            lambda model: sum(x is not None for x in (model.name, model.claim, model.uri)) == 1,
        ),
        Rule(
            "!has(self.revision) || has(self.name)",
            "revision is of a model on the hub: it must not be given without name",
            lambda model: model.revision is None or model.name is not None,
        ),
        Rule(
            "!has(self.credentialsSecretName) || has(self.uri)",
            "credentialsSecretName is for uri: it must not be given without",
            lambda model: model.credentials_secret_name is None or model.uri is not None,
        ),
    )


@dataclass(frozen=True)
class HubSettings(Checked):
    """The Hugging Face hub, for all pods that read a model or a tokenizer."""

    offline: bool = False
    """Whether the hub is never asked: models and tokenizers lie in the weights cache."""
    endpoint: Annotated[str, sized(2048, r"^https?://[^/?#@]+(/[^?#]*)?$")] | None = None
    """A mirror instead of https://huggingface.co."""
    token_secret_name: ObjectName | None = None
    """A Secret whose key `token` opens private models."""


@dataclass(frozen=True)
class IssuerRef(Checked):
    """A cert-manager issuer."""

    name: ObjectName
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"


@dataclass(frozen=True)
class InternalTls(Checked):
    """The certificates of the cluster's own processes: Secrets `<cluster>-internal-router`,
    `-worker` and `-operator`, each with tls.crt, tls.key and ca.crt. A certificate names its role
    by the URI `baton:<role>` and the DNS name `baton-<role>`."""

    issuer_ref: IssuerRef | None = None
    """The cert-manager issuer of these certificates. None: somebody else keeps the Secrets."""


@dataclass(frozen=True)
class RouterTls(Checked):
    """The routers' certificate. Exactly one of `secretName` and `issuerRef`."""

    secret_name: ObjectName | None = None
    """A Secret with tls.crt and tls.key, and ca.crt where clients must show a certificate."""
    issuer_ref: IssuerRef | None = None
    """The cert-manager issuer of the certificate."""
    require_client_certificate: bool = False

    rules = (
        Rule(
            "has(self.secretName) != has(self.issuerRef)",
            "secretName must be given, or issuerRef: exactly one of them",
            lambda tls: (tls.secret_name is None) != (tls.issuer_ref is None),
        ),
    )


@dataclass(frozen=True)
class RouterAuth(Checked):
    """Who may call the routers."""

    token_secret_name: ObjectName
    """A Secret: each key is a tenant, its value the bearer token that tenant's calls carry. Keys
    that end with .yaml map tenants to tokens, or to their limits."""
    operators: Annotated[tuple[str, ...], sized(16)] = ()
    """Tenants whose tokens open the routers' metrics and their page. Prometheus gets the token of
    the first one: its key of the Secret holds one token."""


@dataclass(frozen=True)
class RouterIngress(Checked):
    """Settings of the Ingresses to the routers' Service."""

    class_name: ObjectName | None = None
    """The IngressClass. None: the cluster's default."""
    annotations: Annotated[Mapping[str, str], sized(64)] = field(default_factory=dict)
    """Annotations for the Ingress controller. They go over the operator's own, by which
    ingress-nginx speaks gRPC and HTTP."""
    tls_secret_name: ObjectName | None = None
    """A Secret with the certificate that clients see. None: the routers' own, if any."""


@dataclass(frozen=True)
class RouterSpec(PodSettings):
    """The routers: a Deployment and a Service."""

    replicas: Annotated[int, between(1, 64)] | None = None
    """The number of routers. None: two at first, and then what `kubectl scale` or a
    HorizontalPodAutoscaler makes of the Deployment."""
    tls: RouterTls | None = None
    """The routers' certificate. None: plain text, for clients inside the cluster."""
    auth: RouterAuth | None = None
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    hostname: Hostname | None = None
    """A GRPCRoute or Ingress leads this name to the routers' gRPC. None: nothing does."""
    http_hostname: Hostname | None = None
    """An HTTPRoute or Ingress leads this name to OpenAI's API. Not `hostname`: a Gateway takes one
    kind of route for a name."""
    gateway: Annotated[str, sized(317, NAMESPACED_NAME)] | None = None
    """The Gateway of the routes, as `name` or `namespace/name`. None: Ingresses are made."""
    ingress: RouterIngress | None = None
    trace_endpoint: Annotated[str, sized(2048, "^https?://")] | None = None
    """Where a collector takes traces by OTLP over HTTP: http://collector.observability:4318. None:
    there are none."""
    rules = (
        Rule(
            "!has(self.gateway) || has(self.hostname) || has(self.httpHostname)",
            "hostname or httpHostname is needed where gateway is given",
            lambda router: router.gateway is None or bool(router.hostnames),
        ),
        Rule(
            "!has(self.httpHostname) || !has(self.hostname) || self.httpHostname != self.hostname",
            "httpHostname must not be hostname: a Gateway takes one kind of route for a name",
            lambda router: router.http_hostname is None or router.http_hostname != router.hostname,
        ),
        Rule(
            "!has(self.ingress) || (has(self.hostname) || has(self.httpHostname)) && "
            "!has(self.gateway)",
            "ingress needs hostname or httpHostname, and must not be given beside gateway",
            lambda router: router.ingress is None or router.has_ingress,
        ),
        Rule(
            "!has(self.hostname) && !has(self.httpHostname) || has(self.gateway) || "
            "!has(self.tls) || "
            "!has(self.tls.requireClientCertificate) || !self.tls.requireClientCertificate || "
            "has(self.ingress) && has(self.ingress.annotations) && "
            "self.ingress.annotations.size() > 0",
            "tls.requireClientCertificate needs ingress.annotations where a hostname makes an "
            "Ingress: they let it pass TLS through, or show the routers a certificate",
            lambda router: (
                not router.has_ingress
                or not router.wants_certificates
                or (router.ingress is not None and bool(router.ingress.annotations))
            ),
        ),
    )

    @property
    def hostnames(self) -> list[str]:
        return [name for name in (self.hostname, self.http_hostname) if name is not None]

    @property
    def has_ingress(self) -> bool:
        return bool(self.hostnames) and self.gateway is None

    @property
    def wants_certificates(self) -> bool:
        """Tell whether clients must show a certificate."""
        return self.tls is not None and self.tls.require_client_certificate


@dataclass(frozen=True)
class Images(Checked):
    """Images of the pods. None: those that the operator was installed with."""

    worker: Annotated[str, sized(512)] | None = None
    router: Annotated[str, sized(512)] | None = None
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: Annotated[tuple[str, ...], sized(16)] = ()

    rules = (
        Rule(
            f"!has(self.pullSecrets) || self.pullSecrets.all(name, name.matches('{OBJECT_NAME}'))",
            "pullSecrets must be names of Secrets",
            lambda images: all(re.search(OBJECT_NAME, name) for name in images.pull_secrets),
        ),
    )


@dataclass(frozen=True)
class GcsFaultTolerance(Checked):
    """Where Ray's head keeps its state, so that workers outlive it."""

    redis_address: Annotated[str, sized(512, r"^(rediss?://)?[^/:]+:[0-9]+$")]
    redis_secret_name: ObjectName | None = None
    """A Secret with the password of that Redis, under the key `password`."""


@dataclass(frozen=True)
class RaySpec(Checked):
    """The Ray cluster under the workers."""

    version: Annotated[str, sized(32, RAY_VERSION)] | None = None
    """Ray's version in the worker image, 2.52 or newer. None: that of the default image."""
    token_secret_name: ObjectName | None = None
    """A Secret with the token of Ray's processes, key "auth_token". None: the operator makes it."""
    gcs_fault_tolerance: GcsFaultTolerance | None = None
    """A Redis that keeps the head's state. None: when the head's pod is lost, all workers end."""
    head_template: Annotated[Mapping[str, Any], POD_TEMPLATE] = field(default_factory=dict)
    """A PodTemplateSpec that is merged over the operator's own for the head."""


@dataclass(frozen=True)
class Fabric(Checked):
    """Puts all pools on nodes that are near each other: KV crosses between prefill and decode."""

    node_label: Annotated[str, sized(317, LABEL_KEY)] = ZONE
    """Workers go to nodes with the same value of this label. It may name a zone, a block of the
    network or a switch, such as network.topology.nvidia.com/leaf."""
    required: bool = False
    """Whether a pod waits until such a node has room. If not, it goes elsewhere."""


@dataclass(frozen=True)
class SpotNotices(Checked):
    """A cloud's notice that it takes a spot machine back. The worker's pod then drains by itself,
    as when it is deleted."""

    cloud: Literal["aws", "gcp", "azure"]
    """Each worker's pod asks this cloud's metadata service."""
    address: Annotated[str, sized(256, r"^http://[0-9A-Za-z.:\[\]-]+$")] = "http://169.254.169.254"
    """Where pods reach the metadata service."""
    notice: Duration = "30s"
    """Time until the machine ends, where the notice does not name it (gcp). Requests that still run
    then are computed again elsewhere, whatever `drainTimeout` says."""


@dataclass(frozen=True)
class UnitRollout(Checked):
    """How a new unit replaces the one that serves."""

    strategy: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    """RollingUpdate: the coming unit grows beside the former one. Recreate: the former unit drains
    and goes first; requests wait at the routers. A pool without room for a worker of both units
    (`maxSurge: 0`, and no more workers than `maxUnavailable`) is always recreated."""
    max_surge: Annotated[int, between(0, 512)] = 1
    """Workers that a pool may have beyond its size while there are two units."""
    max_unavailable: Annotated[int, between(0, 512)] = 0
    """Live workers that a pool may lack while there are two units."""
    steps: Annotated[tuple[int, ...], sized(16)] = (1, 10, 50, 100)
    """Percent of workers and requests that the coming unit gets at each step, where the model
    changes. Where it does not, requests follow the live workers."""
    interval: Duration = "5m"
    """How long each step is watched, the last one until the coming unit has ended ten requests."""
    pause: bool = False
    """Whether the rollout stays at its step."""
    ready_timeout: Duration = "30m"
    """The coming unit goes back when no further worker of it becomes live within this time."""
    max_failure_percent: Annotated[int, between(0, 100)] = 5
    """The coming unit goes back when it fails this many percent more of its requests than the
    former unit."""
    max_slowdown: Annotated[float, between(1, 1000)] = 2.0
    """The coming unit goes back when its median gap between tokens is this many times the former
    unit's."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the steps as shares, of which the last is 1."""
        return tuple(sorted({*(step / 100 for step in self.steps), 1.0}))

    @property
    def interval_s(self) -> float:
        return seconds(self.interval)

    @property
    def ready_timeout_s(self) -> float:
        return seconds(self.ready_timeout)

    rules = (
        Rule(
            "!(has(self.maxSurge) && self.maxSurge == 0) || "
            "(has(self.maxUnavailable) && self.maxUnavailable > 0)",
            "maxUnavailable must be greater than 0 where maxSurge is 0",
            lambda rollout: rollout.max_surge > 0 or rollout.max_unavailable > 0,
        ),
        Rule(
            "!has(self.steps) || self.steps.all(step, step >= 1 && step <= 100)",
            "steps must be percentages from 1 to 100",
            lambda rollout: all(1 <= step <= 100 for step in rollout.steps),
        ),
    )


@dataclass(frozen=True)
class Advanced(Checked):
    """Timeouts and tuning of each part. The defaults suit most clusters."""

    router: RouterConfig = field(default_factory=RouterConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    planner: PlannerTuning = field(default_factory=PlannerTuning)
    engine: EngineTuning = field(default_factory=EngineTuning)

    def __post_init__(self) -> None:
        super().__post_init__()
        for section, names in OPERATORS.items():
            given = getattr(self, section)
            usual = type(given)()
            for name in names:
                if attrgetter(name)(given) != attrgetter(name)(usual):
                    raise ValueError(f"{section}.{name} must not be given: the operator sets it")


@dataclass(frozen=True)
class ServingClusterSpec(Checked):
    """One model, its routers and its pools; sections as in cluster.yaml."""

    model: ModelSource
    pools: Annotated[Mapping[str, PoolTemplate], sized(32)]
    """The pools by name. Each becomes a WorkerPool that is called `<cluster>-<pool>`."""
    tokenizer: Annotated[str, sized(1024)] | None = None
    """The tokenizer, where the model's own files hold none: a folder of the worker's image or of
    the model's claim, or a name on the hub."""
    hub: HubSettings = field(default_factory=HubSettings)
    served_model_name: Annotated[str, sized(SOURCE)] | None = None
    """What clients call the model. None: the last part of the first model's source; later models
    keep that name (`status.model`)."""
    served_model_aliases: Annotated[tuple[str, ...], sized(32)] = ()
    """Further names that clients may call it by; answers have the first name."""
    log_level: LogLevel = "info"
    """The log level of every process but the operator. A change of it or of `logFormat` reaches
    those that run within two minutes."""
    log_format: LogFormat = "text"
    """How logs are written: text, or json with an object a line."""
    router: RouterSpec = field(default_factory=RouterSpec)
    internal_tls: InternalTls | None = None
    """Certificates of the cluster's own processes. None: they know each other by keys that the
    operator makes."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    planner: PlannerTargets = field(default_factory=PlannerTargets)
    """Settings of the planner, for pools whose `scaling.mode` is planner."""
    images: Images = field(default_factory=Images)
    ray: RaySpec = field(default_factory=RaySpec)
    fabric: Fabric = field(default_factory=Fabric)
    spot_notices: SpotNotices | None = None
    """The cloud that is asked whether a machine is taken back. None: nobody asks."""
    rollout: UnitRollout = field(default_factory=UnitRollout)
    advanced: Annotated[Advanced, AS_WRITTEN] = field(default_factory=Advanced)
    """Timeouts and tuning of `router`, `transfer`, `worker`, `decode`, `registry`, `supervisor`,
    `planner` and `engine`. The operator checks them; the reference lists all."""

    object_rules = (
        Rule(
            f"self.metadata.name.matches('{CLUSTER_NAME}')",
            "metadata.name must be of 1 to 47 small letters, digits and -, begin with a letter and "
            "end with a letter or digit",
            lambda cluster: re.search(CLUSTER_NAME, cluster["metadata"]["name"]) is not None,
        ),
    )
    rules = (
        Rule(
            f"self.pools.all(name, name.matches('{POOL_NAME}'))",
            "pools must have names of 1 to 34 small letters, digits and -, and begin and end with "
            "a letter or digit",
            lambda spec: all(re.search(POOL_NAME, name) for name in spec.pools),
        ),
        Rule(
            "self.pools.exists(name, self.pools[name].role != 'prefill')",
            "pools need at least one of role decode or mixed",
            lambda spec: any(pool.role is not Role.PREFILL for pool in spec.pools.values()),
        ),
        Rule(
            "has(self.internalTLS) == has(oldSelf.internalTLS) && "
            "(!has(self.internalTLS) || self.internalTLS == oldSelf.internalTLS)",
            "internalTLS cannot be changed: make another cluster",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        has_prefill = any(pool.role is not Role.DECODE for pool in self.pools.values())
        if self.advanced.router.placement.local_prefill == "never" and not has_prefill:
            raise ValueError(
                "advanced.router.placement.local_prefill must not be never without a pool of role "
                "prefill or mixed"
            )
        try:
            _ = self.planner_config
        except ValueError as error:
            raise ValueError(f"planner.{error}") from error
        for name, pool in self.pools.items():
            self._check_engine(name, pool)

    def _check_engine(self, name: str, pool: PoolTemplate) -> None:
        merged = settings.merge(respelt(settings.dump(self.engine), camel), pool.engine)
        key = f"pools.{name}.engine"
        try:
            settings.parse(EngineSettings, merged, source="spec", key=key, spell=camel)
        except ConfigError as error:
            raise ValueError(
                f"{error.field} {str(error).partition(f'{error.field}: ')[2]}"
            ) from error

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(**vars(self.engine), **vars(self.advanced.engine))

    @property
    def planner_config(self) -> PlannerConfig:
        return PlannerConfig(**vars(self.planner), **vars(self.advanced.planner))
