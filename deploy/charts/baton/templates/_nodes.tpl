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

{{- /* The volume `weights` of the pods; {} for what the operator makes it: gone with its pod. */ -}}
{{- define "baton.weights" -}}
{{- $cache := (include "baton.nodes" . | fromJson).weightsCache -}}
{{- if and $cache.hostPath $cache.claimName -}}
{{- fail "cluster.nodes.weightsCache: hostPath or claimName, not both" -}}
{{- end -}}
{{- if $cache.hostPath -}}
{{- dict "name" "weights" "emptyDir" nil "hostPath" (dict "path" $cache.hostPath "type" "Directory") | toJson -}}
{{- else if $cache.claimName -}}
{{- dict "name" "weights" "emptyDir" nil "persistentVolumeClaim" (dict "claimName" $cache.claimName) | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- /* What every pool's pods have of cluster.nodes: a PodTemplateSpec over the operator's own. */ -}}
{{- define "baton.workerTemplate" -}}
{{- $nodes := include "baton.nodes" . | fromJson -}}
{{- $env := list -}}
{{- range $name, $value := default dict $nodes.env -}}
{{- /* As JSON, which has no exponent where toString has one: 1048576. */ -}}
{{- $env = append $env (dict "name" $name "value" (ternary $value (toJson $value) (kindIs "string" $value))) -}}
{{- end -}}
{{- $volumes := list -}}
{{- with $nodes.shmSize -}}
{{- $volumes = append $volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" .)) -}}
{{- end -}}
{{- with include "baton.weights" . | fromJson -}}
{{- $volumes = append $volumes . -}}
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

{{- /* The ServingCluster's spec: cluster.spec over what cluster.nodes, cluster.redis, hub and images
say. */ -}}
{{- define "baton.clusterSpec" -}}
{{- $preset := include "baton.preset" . | fromJson -}}
{{- $own := dict "engine" $preset.engine "pools" dict -}}
{{- with $preset.transfer -}}{{- $_ := set $own "transfer" . -}}{{- end -}}
{{- $images := dict "pullPolicy" .Values.images.pullPolicy -}}
{{- with .Values.images.pullSecrets -}}{{- $_ := set $images "pullSecrets" . -}}{{- end -}}
{{- $_ := set $own "images" $images -}}
{{- $worker := include "baton.workerTemplate" . | fromJson -}}
{{- if $worker -}}
{{- range $name, $pool := .Values.cluster.spec.pools -}}
{{- $_ := set $own.pools $name (dict "template" $worker) -}}
{{- end -}}
{{- end -}}
{{- $hub := dict -}}
{{- range $name, $value := .Values.hub -}}
{{- with $value -}}{{- $_ := set $hub $name . -}}{{- end -}}
{{- end -}}
{{- with $hub -}}{{- $_ := set $own "hub" . -}}{{- end -}}
{{- /* A claim may be mounted anywhere; a node's folder is of the workers' nodes. */ -}}
{{- with (include "baton.nodes" . | fromJson).weightsCache.claimName -}}
{{- $template := dict "spec" (dict "volumes" (list (include "baton.weights" $ | fromJson))) -}}
{{- $_ := set $own "router" (dict "template" $template) -}}
{{- $_ := set $own "ray" (dict "headTemplate" $template) -}}
{{- end -}}
{{- with include "baton.faultTolerance" . | fromJson -}}
{{- $_ := set $own "ray" (merge (dict "gcsFaultTolerance" .) (default dict $own.ray)) -}}
{{- end -}}
{{- (include "baton.merged" (dict "own" $own "over" .Values.cluster.spec "key" "") | fromJson).value | toJson -}}
{{- end -}}
