{{- /* Of a pool: whether its engine computes on GPUs, its ranks, what its pods have of RDMA and huge
pages: flags of cluster.preflight. `spec`: the ServingCluster's; `pool`; `resources`: the pod's. */ -}}
{{- define "baton.preflightFlags" -}}
{{- $flags := list "--ucx-library" (dig "advanced" "transfer" "ucxLibrary" "wheel" .spec) -}}
{{- if eq (include "baton.poolDevice" .) "cuda" -}}
{{- $flags = concat $flags (list "--gpus" (include "baton.poolRanks" .)) -}}
{{- end -}}
{{- range $name, $_ := default dict .resources.limits -}}
{{- if hasPrefix "rdma/" $name -}}{{- $flags = append $flags "--rdma" -}}{{- end -}}
{{- if hasPrefix "hugepages-" $name -}}{{- $flags = append $flags "--hugepages" -}}{{- end -}}
{{- end -}}
{{- $flags | uniq | toJson -}}
{{- end -}}

{{- define "baton.poolDevice" -}}
{{- $own := (default dict .pool.engine).device -}}
{{- $device := default "auto" (default (default dict .spec.engine).device $own) -}}
{{- if eq $device "auto" -}}
{{- $device = "cpu" -}}
{{- if contains "\"nvidia.com/" (pick .pool "nodeSelector" "tolerations" | toJson) -}}{{- $device = "cuda" -}}{{- end -}}
{{- $containers := default list (dig "podTemplate" "spec" "containers" list .pool) -}}
{{- range prepend $containers (dict "resources" .pool.resources) -}}
{{- range $name, $_ := default dict (default dict .resources).limits -}}
{{- if hasPrefix "nvidia.com/" $name -}}{{- $device = "cuda" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $device -}}
{{- end -}}

{{- define "baton.poolRanks" -}}
{{- default 1 (default dict .pool.parallelism).tensor -}}
{{- end -}}

{{- /* Which pools' Jobs hand over KV: JSON of {sender, receiver}; empty where no two pools do. */ -}}
{{- define "baton.preflightPair" -}}
{{- $pair := dict -}}
{{- range $name, $pool := .pools -}}
{{- if and (has $pool.role (list "decode" "mixed")) (not $pair.receiver) -}}
{{- $_ := set $pair "receiver" $name -}}
{{- else if and (has $pool.role (list "prefill" "mixed")) (not $pair.sender) -}}
{{- $_ := set $pair "sender" $name -}}
{{- end -}}
{{- end -}}
{{- ternary $pair dict (and (hasKey $pair "sender") (hasKey $pair "receiver")) | toJson -}}
{{- end -}}

{{- /* A pool's pod as the operator makes it, but for what only a worker needs. It avoids a node that
has another pool's, so that KV goes over a link. `labels`: of these pods. */ -}}
{{- define "baton.preflightPod" -}}
{{- $requests := dict "cpu" "1" "memory" "2Gi" -}}
{{- $resources := dict "requests" $requests -}}
{{- if eq (include "baton.poolDevice" .) "cuda" -}}
{{- $gpus := dict "nvidia.com/gpu" (include "baton.poolRanks" .) -}}
{{- $resources = dict "requests" (merge $requests $gpus) "limits" $gpus -}}
{{- end -}}
{{- $mounts := list (dict "name" "tmp" "mountPath" "/tmp") (dict "name" "shm" "mountPath" "/dev/shm") -}}
{{- $security := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- $container := dict "name" "ray-worker" "env" (list (dict "name" "HOME" "value" "/tmp") (dict "name" "NODE_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "spec.nodeName")))) "resources" $resources "volumeMounts" $mounts "securityContext" $security -}}
{{- $volumes := list (dict "name" "tmp" "emptyDir" dict) (dict "name" "shm" "emptyDir" (dict "medium" "Memory")) -}}
{{- $apart := dict "weight" 100 "podAffinityTerm" (dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" .labels)) -}}
{{- $affinity := dict "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list $apart)) -}}
{{- $spec := dict "affinity" $affinity "containers" (list $container) "volumes" $volumes "securityContext" (dict "fsGroup" 1000 "fsGroupChangePolicy" "OnRootMismatch" "runAsUser" 1000 "runAsNonRoot" true) -}}
{{- $secrets := list -}}
{{- range (default dict .spec.images).pullSecrets -}}{{- $secrets = append $secrets (dict "name" .) -}}{{- end -}}
{{- with $secrets -}}{{- $_ := set $spec "imagePullSecrets" . -}}{{- end -}}
{{- $over := dict -}}
{{- range $name := tuple "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" -}}
{{- with get $.pool $name -}}{{- $_ := set $over $name . -}}{{- end -}}
{{- end -}}
{{- $_ := set $over "containers" (list (merge (dict "name" "ray-worker") (pick .pool "resources" "env"))) -}}
{{- $own := include "baton.merged" (dict "own" (dict "spec" $spec) "over" (dict "spec" $over) "key" "") | fromJson -}}
{{- $template := include "baton.merged" (dict "own" $own.value "over" (default dict .pool.podTemplate) "key" "") | fromJson -}}
{{- (include "baton.withoutNone" (dict "value" $template.value "key" "") | fromJson).value | toJson -}}
{{- end -}}

{{- /* The preflight in the place of a worker, with what that has: of its volumes those that are the Job's
too, for it needs neither the model nor what the operator keeps. `root`; `spec`; `pool`; `pod`: what
baton.preflightPod made; `more`: flags. */ -}}
{{- define "baton.preflightContainer" -}}
{{- $volumes := list -}}
{{- range .pod.volumes -}}{{- $volumes = append $volumes .name -}}{{- end -}}
{{- $images := default dict .spec.images -}}
{{- range .pod.containers -}}
{{- if eq .name "ray-worker" -}}
{{- $flags := include "baton.preflightFlags" (dict "spec" $.spec "pool" $.pool "resources" .resources) | fromJsonArray -}}
{{- $own := dict "name" "preflight" "terminationMessagePolicy" "FallbackToLogsOnError" "command" (concat (list "python" "-m" "cluster.preflight") $flags $.more) -}}
{{- $_ := set $own "image" (coalesce .image $images.worker (include "baton.image" (dict "root" $.root "of" "worker"))) -}}
{{- $_ := set $own "imagePullPolicy" (coalesce .imagePullPolicy $images.pullPolicy $.root.Values.images.pullPolicy) -}}
{{- $mounts := list -}}
{{- range .volumeMounts -}}
{{- if has .name $volumes -}}{{- $mounts = append $mounts . -}}{{- end -}}
{{- end -}}
{{- $_ := set $own "volumeMounts" $mounts -}}
{{- merge $own (omit . "args" "lifecycle" "ports" "readinessProbe" "livenessProbe" "startupProbe" "volumeMounts") | toJson -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Null takes a key away, 0 a device's resource. JSON of {value: ...}; `key`: under which it lies. */ -}}
{{- define "baton.withoutNone" -}}
{{- if kindIs "map" .value -}}
  {{- $result := dict -}}
  {{- $key := .key -}}
  {{- range $name, $value := .value -}}
    {{- $isNone := and (contains "/" $name) (has $key (list "requests" "limits")) (eq (toString $value) "0") -}}
    {{- if not (or $isNone (kindIs "invalid" $value)) -}}
      {{- $_ := set $result $name (include "baton.withoutNone" (dict "value" $value "key" $name) | fromJson).value -}}
    {{- end -}}
  {{- end -}}
  {{- dict "value" $result | toJson -}}
{{- else if kindIs "slice" .value -}}
  {{- $result := list -}}
  {{- range .value -}}
    {{- $result = append $result (include "baton.withoutNone" (dict "value" . "key" "") | fromJson).value -}}
  {{- end -}}
  {{- dict "value" $result | toJson -}}
{{- else -}}
  {{- dict "value" .value | toJson -}}
{{- end -}}
{{- end -}}
