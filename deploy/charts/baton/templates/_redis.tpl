{{- /* cluster.redis, where the first ServingCluster is to have the chart's own; else {}. */ -}}
{{- define "baton.redis" -}}
{{- $redis := .Values.cluster.redis -}}
{{- $given := dig "ray" "gcsFaultTolerance" dict .Values.cluster.spec -}}
{{- $wanted := $redis.enabled -}}
{{- if kindIs "invalid" $wanted -}}
{{- $now := include "baton.clusterNow" . | fromJson -}}
{{- if $given -}}
{{- $wanted = false -}}
{{- else if $now -}}
{{- $own := printf "%s:6379" (include "baton.redisName" .) -}}
{{- $wanted = eq $own (dig "spec" "ray" "gcsFaultTolerance" "redisAddress" "" $now) -}}
{{- else -}}
{{- $wanted = eq (include "baton.hasSeveralWorkers" .) "true" -}}
{{- end -}}
{{- else if and $wanted $given -}}
{{- fail "cluster.redis.enabled or cluster.spec.ray.gcsFaultTolerance, which names another Redis, not both" -}}
{{- end -}}
{{- if and .Values.cluster.enabled (eq (toString $wanted) "true") -}}
{{- $storage := $redis.storage -}}
{{- if kindIs "invalid" $storage -}}{{- $storage = include "baton.redisStorageNow" . -}}{{- end -}}
{{- merge (dict "storage" $storage) (omit $redis "storage") | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- /* The size of the volume that the chart's Redis has; "" where it runs without one, for another Redis
would begin empty, and end every worker. */ -}}
{{- define "baton.redisStorageNow" -}}
{{- $name := include "baton.redisName" . -}}
{{- $runs := lookup "apps/v1" "Deployment" .Release.Namespace $name -}}
{{- $hasVolume := not $runs -}}
{{- range dig "spec" "template" "spec" "volumes" list $runs -}}
{{- if hasKey . "persistentVolumeClaim" -}}{{- $hasVolume = true -}}{{- end -}}
{{- end -}}
{{- if $hasVolume -}}
{{- $claim := lookup "v1" "PersistentVolumeClaim" .Release.Namespace $name -}}
{{- dig "spec" "resources" "requests" "storage" "1Gi" $claim -}}
{{- end -}}
{{- end -}}

{{- /* The first ServingCluster as the API server has it: JSON, {} where there is none, or nobody to ask
(helm template). What it has of a Redis decides on every upgrade: to take it away, or to give it one,
costs all workers a start, and initialReplicas say nothing of a cluster that has been scaled since. */ -}}
{{- define "baton.clusterNow" -}}
{{- if .Capabilities.APIVersions.Has "baton.dev/v1alpha1/ServingCluster" -}}
{{- lookup "baton.dev/v1alpha1" "ServingCluster" .Release.Namespace .Values.cluster.name | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- /* Whether workers may be on several nodes: a replica is one pod. What somebody else than a person
scales has no size that is known here. */ -}}
{{- define "baton.hasSeveralWorkers" -}}
{{- $workers := 0 -}}
{{- range $pool := .Values.cluster.spec.pools -}}
{{- $isScaled := ne (dig "scaling" "mode" "manual" $pool) "manual" -}}
{{- $workers = add $workers (ternary 2 (int64 (dig "initialReplicas" 1 $pool)) $isScaled) -}}
{{- end -}}
{{- gt $workers 1 -}}
{{- end -}}

{{- define "baton.redisName" -}}
{{- .Values.cluster.name | trunc 57 | trimSuffix "-" }}-redis
{{- end -}}

{{- define "baton.redisImage" -}}
{{- $image := .Values.cluster.redis.image -}}
{{- with ternary (default "docker.io" .Values.images.registry) $image.registry (kindIs "invalid" $image.registry) }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository }}:{{ $image.tag }}
{{- with $image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{- /* What the ServingCluster is told of it. */ -}}
{{- define "baton.faultTolerance" -}}
{{- $redis := include "baton.redis" . | fromJson -}}
{{- if $redis -}}
{{- $name := include "baton.redisName" . -}}
{{- dict "redisAddress" (printf "%s:6379" $name) "redisSecretName" (default $name $redis.secretName) | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}
