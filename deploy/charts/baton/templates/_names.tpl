{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "baton.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "baton.labels" -}}
app.kubernetes.io/name: {{ include "baton.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "baton.account" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name must be given where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* One of .Values.images: `root` and `of`, its name there. */ -}}
{{- define "baton.image" -}}
{{- $images := .root.Values.images -}}
{{- $image := get $images .of -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository }}:{{ default .root.Chart.AppVersion $images.tag -}}
{{- with $image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{- define "baton.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Of everything that the chart runs: what the `restricted` pod security standard asks. */ -}}
{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* `name` in at most `most` characters: one that is cut ends in a sum of the whole, or two could
become one. */ -}}
{{- define "baton.cut" -}}
{{- if le (len .name) (int .most) -}}
{{- .name -}}
{{- else -}}
{{- printf "%s-%s" (.name | trunc (int (sub .most 6)) | trimSuffix "-") (.name | sha256sum | trunc 5) -}}
{{- end -}}
{{- end -}}

{{- /* The operators: JSON of a list of {name, namespace}; an empty namespace is all of them. */ -}}
{{- define "baton.scopes" -}}
{{- $name := include "baton.fullname" . -}}
{{- $scopes := list -}}
{{- range .Values.watchNamespaces -}}
{{- $scopes = append $scopes (dict "name" (include "baton.cut" (dict "name" (printf "%s-%s" $name .) "most" 63)) "namespace" .) -}}
{{- else -}}
{{- $scopes = list (dict "name" $name "namespace" "") -}}
{{- end -}}
{{- $scopes | toJson -}}
{{- end -}}

{{- /* What a client of the first ServingCluster is to show and to trust, as options of `baton`. */ -}}
{{- define "baton.client.credentials" -}}
{{- $router := .Values.cluster.spec.router | default dict -}}
{{- with $router.tls }}--tls-ca CA.crt --tls-server-name {{ $.Values.cluster.name }}-router.{{ $.Release.Namespace }}.svc {{ if .requireClientCertificate }}--tls-cert MINE.crt --tls-key MINE.key {{ end }}{{ end -}}
{{- with $router.auth }}--token-file FILE {{ end -}}
{{- end -}}
