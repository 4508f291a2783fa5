{{- define "baton.preset" -}}
{{- $path := printf "presets/%s.yaml" .Values.cluster.nodes.preset -}}
{{- .Files.Get $path | fromYaml | toJson -}}
{{- end -}}

{{- /* cluster.nodes, and the preset's where it says nothing. */ -}}
{{- define "baton.nodes" -}}
{{- $nodes := (include "baton.preset" . | fromJson).nodes -}}
{{- range $name, $value := .Values.cluster.nodes -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $nodes $name $value -}}{{- end -}}
{{- end -}}
{{- $nodes | toJson -}}
{{- end -}}

{{- /* Environment of whatever reads a model or a tokenizer. */ -}}
{{- define "baton.hubEnv" -}}
{{- $env := list -}}
{{- if .Values.hub.offline -}}
{{- $env = append $env (dict "name" "HF_HUB_OFFLINE" "value" "1") -}}
{{- end -}}
{{- with .Values.hub.endpoint -}}
{{- $env = append $env (dict "name" "HF_ENDPOINT" "value" .) -}}
{{- end -}}
{{- with .Values.hub.tokenSecretName -}}
{{- $from := dict "secretKeyRef" (dict "name" . "key" "token") -}}
{{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" $from) -}}
{{- end -}}
{{- $env | toJson -}}
{{- end -}}

{{- /* A PodTemplateSpec with the hub's environment in one container: `root`, `container`; {} for none. */ -}}
{{- define "baton.hubTemplate" -}}
{{- $env := include "baton.hubEnv" .root | fromJsonArray -}}
{{- if $env -}}
{{- dict "spec" (dict "containers" (list (dict "name" .container "env" $env))) | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- /* What every pool's pods have of cluster.nodes: a PodTemplateSpec over the operator's own. */ -}}
{{- define "baton.workerTemplate" -}}
{{- $nodes := include "baton.nodes" . | fromJson -}}
{{- $env := include "baton.hubEnv" . | fromJsonArray -}}
{{- range $name, $value := default dict $nodes.env -}}
{{- $env = append $env (dict "name" $name "value" (toString $value)) -}}
{{- end -}}
{{- $volumes := list -}}
{{- with $nodes.shmSize -}}
{{- $volumes = append $volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" .)) -}}
{{- end -}}
{{- $cache := $nodes.weightsCache -}}
{{- if and $cache.hostPath $cache.claimName -}}
{{- fail "cluster.nodes.weightsCache: hostPath or claimName, not both" -}}
{{- end -}}
{{- with $cache.hostPath -}}
{{- $volumes = append $volumes (dict "name" "weights" "hostPath" (dict "path" . "type" "Directory")) -}}
{{- end -}}
{{- with $cache.claimName -}}
{{- $volumes = append $volumes (dict "name" "weights" "persistentVolumeClaim" (dict "claimName" .)) -}}
{{- end -}}
{{- if or $cache.hostPath $cache.claimName -}}
{{- $env = append $env (dict "name" "HF_HOME" "value" "/var/cache/baton/weights/hub") -}}
{{- end -}}
{{- $container := dict "name" "ray-worker" -}}
{{- with $env -}}{{- $_ := set $container "env" . -}}{{- end -}}
{{- with $nodes.resources -}}
{{- $_ := set $container "resources" (dict "requests" . "limits" .) -}}
{{- end -}}
{{- if $nodes.ipcLock -}}
{{- $capabilities := dict "drop" (list "ALL") "add" (list "IPC_LOCK") -}}
{{- $_ := set $container "securityContext" (dict "capabilities" $capabilities "runAsUser" 0 "runAsNonRoot" false) -}}
{{- end -}}
{{- $spec := dict -}}
{{- if $nodes.sharedMemory -}}
{{- $_ := merge $spec (dict "hostIPC" true "hostPID" true) -}}
{{- end -}}
{{- range $name := tuple "nodeSelector" "tolerations" -}}
{{- with get $nodes $name -}}{{- $_ := set $spec $name . -}}{{- end -}}
{{- end -}}
{{- with $volumes -}}{{- $_ := set $spec "volumes" . -}}{{- end -}}
{{- if gt (len $container) 1 -}}{{- $_ := set $spec "containers" (list $container) -}}{{- end -}}
{{- $template := dict -}}
{{- with $nodes.annotations -}}{{- $_ := set $template "metadata" (dict "annotations" .) -}}{{- end -}}
{{- with $spec -}}{{- $_ := set $template "spec" . -}}{{- end -}}
{{- $template | toJson -}}
{{- end -}}

{{- /* The ServingCluster's spec: cluster.spec over what cluster.nodes, hub and images say. */ -}}
{{- define "baton.clusterSpec" -}}
{{- $preset := include "baton.preset" . | fromJson -}}
{{- $own := dict "engine" $preset.engine "pools" dict -}}
{{- with $preset.transfer -}}{{- $_ := set $own "transfer" . -}}{{- end -}}
{{- with .Values.images.pullSecrets -}}{{- $_ := set $own "images" (dict "pullSecrets" .) -}}{{- end -}}
{{- $worker := include "baton.workerTemplate" . | fromJson -}}
{{- if $worker -}}
{{- range $name, $pool := .Values.cluster.spec.pools -}}
{{- $_ := set $own.pools $name (dict "template" $worker) -}}
{{- end -}}
{{- end -}}
{{- with include "baton.hubTemplate" (dict "root" . "container" "router") | fromJson -}}
{{- $_ := set $own "router" (dict "template" .) -}}
{{- end -}}
{{- with include "baton.hubTemplate" (dict "root" . "container" "ray-head") | fromJson -}}
{{- $_ := set $own "ray" (dict "headTemplate" .) -}}
{{- end -}}
{{- (include "baton.merged" (dict "own" $own "over" .Values.cluster.spec "key" "") | fromJson).value | toJson -}}
{{- end -}}
