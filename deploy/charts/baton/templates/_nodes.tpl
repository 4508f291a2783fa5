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

{{- /* What pods that are no workers have of cluster.nodes: JSON of nodeSelector and tolerations. Labels
of nvidia.com say which GPUs workers get: the others need none. */ -}}
{{- define "baton.otherPods" -}}
{{- $nodes := include "baton.nodes" . | fromJson -}}
{{- $pod := dict -}}
{{- range $name, $value := default dict $nodes.nodeSelector -}}
{{- if not (hasPrefix "nvidia.com/" $name) -}}{{- $_ := merge $pod (dict "nodeSelector" (dict $name $value)) -}}{{- end -}}
{{- end -}}
{{- with $nodes.tolerations -}}{{- $_ := set $pod "tolerations" . -}}{{- end -}}
{{- $pod | toJson -}}
{{- end -}}

{{- /* What every pool has of cluster.nodes: its own fields of pods, and a podTemplate. */ -}}
{{- define "baton.workerPods" -}}
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
{{- $pool := dict -}}
{{- with $env -}}{{- $_ := set $pool "env" . -}}{{- end -}}
{{- with $nodes.resources -}}
{{- $_ := set $pool "resources" (dict "requests" . "limits" .) -}}
{{- end -}}
{{- range $name := tuple "nodeSelector" "tolerations" -}}
{{- with get $nodes $name -}}{{- $_ := set $pool $name . -}}{{- end -}}
{{- end -}}
{{- $spec := dict -}}
{{- if $nodes.sharedMemory -}}
{{- $_ := merge $spec (dict "hostIPC" true "hostPID" true) -}}
{{- end -}}
{{- with $volumes -}}{{- $_ := set $spec "volumes" . -}}{{- end -}}
{{- if $nodes.ipcLock -}}
{{- $capabilities := dict "drop" (list "ALL") "add" (list "IPC_LOCK") -}}
{{- $security := dict "capabilities" $capabilities "runAsUser" 0 "runAsNonRoot" false -}}
{{- $_ := set $spec "containers" (list (dict "name" "ray-worker" "securityContext" $security)) -}}
{{- end -}}
{{- $template := dict -}}
{{- with $nodes.annotations -}}{{- $_ := set $template "metadata" (dict "annotations" .) -}}{{- end -}}
{{- with $spec -}}{{- $_ := set $template "spec" . -}}{{- end -}}
{{- with $template -}}{{- $_ := set $pool "podTemplate" . -}}{{- end -}}
{{- $pool | toJson -}}
{{- end -}}

{{- /* The ServingCluster's spec: cluster.spec over what cluster.nodes, cluster.redis, hub and images
say. */ -}}
{{- define "baton.clusterSpec" -}}
{{- $preset := include "baton.preset" . | fromJson -}}
{{- $own := dict "engine" $preset.engine "pools" dict -}}
{{- with $preset.advanced -}}{{- $_ := set $own "advanced" . -}}{{- end -}}
{{- $images := dict "pullPolicy" .Values.images.pullPolicy -}}
{{- with .Values.images.pullSecrets -}}{{- $_ := set $images "pullSecrets" . -}}{{- end -}}
{{- $_ := set $own "images" $images -}}
{{- $worker := include "baton.workerPods" . | fromJson -}}
{{- if $worker -}}
{{- range $name, $pool := .Values.cluster.spec.pools -}}
{{- $_ := set $own.pools $name $worker -}}
{{- end -}}
{{- end -}}
{{- $hub := dict -}}
{{- range $name, $value := .Values.hub -}}
{{- with $value -}}{{- $_ := set $hub $name . -}}{{- end -}}
{{- end -}}
{{- with $hub -}}{{- $_ := set $own "hub" . -}}{{- end -}}
{{- $head := include "baton.otherPods" . | fromJson -}}
{{- with $head -}}{{- $_ := set $own "router" (deepCopy .) -}}{{- end -}}
{{- /* A claim may be mounted anywhere; a node's folder is on the workers' nodes. */ -}}
{{- with (include "baton.nodes" . | fromJson).weightsCache.claimName -}}
{{- $_ := set $head "volumes" (list (include "baton.weights" $ | fromJson)) -}}
{{- end -}}
{{- with $head -}}{{- $_ := set $own "ray" (dict "headTemplate" (dict "spec" .)) -}}{{- end -}}
{{- with include "baton.faultTolerance" . | fromJson -}}
{{- $_ := set $own "ray" (merge (dict "gcsFaultTolerance" .) (default dict $own.ray)) -}}
{{- end -}}
{{- (include "baton.merged" (dict "own" $own "over" .Values.cluster.spec "key" "") | fromJson).value | toJson -}}
{{- end -}}
