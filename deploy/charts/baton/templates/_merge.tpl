{{- /* `over` laid over `own` as deploy/controller/manifests/merge.py does, but for null, and 0 of a
device's resource, which stay, since they mean something to the operator. JSON of {value: ...}; `key`: under which the two lie. */ -}}
{{- define "baton.merged" -}}
{{- $named := dict "containers" "name" "initContainers" "name" "volumes" "name" "env" "name" "volumeMounts" "mountPath" "imagePullSecrets" "name" -}}
{{- if and (kindIs "map" .own) (kindIs "map" .over) -}}
  {{- $result := deepCopy .own -}}
  {{- $own := .own -}}
  {{- range $name, $value := .over -}}
    {{- if hasKey $own $name -}}
      {{- $value = (include "baton.merged" (dict "own" (get $own $name) "over" $value "key" $name) | fromJson).value -}}
    {{- end -}}
    {{- $_ := set $result $name $value -}}
  {{- end -}}
  {{- dict "value" $result | toJson -}}
{{- else if and (hasKey $named .key) (kindIs "slice" .own) (kindIs "slice" .over) -}}
  {{- $by := get $named .key -}}
  {{- $theirs := dict -}}
  {{- range .over -}}{{- $_ := set $theirs (get . $by) . -}}{{- end -}}
  {{- $result := list -}}
  {{- $key := .key -}}
  {{- range .own -}}
    {{- $name := get . $by -}}
    {{- $item := . -}}
    {{- if hasKey $theirs $name -}}
      {{- $over := get $theirs $name -}}
      {{- if eq $key "env" "volumes" -}}
        {{- $item = dict -}}
        {{- range $name, $value := . -}}
          {{- if and (eq $key "volumes") (hasKey $over $name) -}}{{- $_ := set $item $name $value -}}{{- end -}}
        {{- end -}}
      {{- end -}}
      {{- $item = (include "baton.merged" (dict "own" $item "over" $over "key" "") | fromJson).value -}}
      {{- $_ := unset $theirs $name -}}
    {{- end -}}
    {{- $result = append $result $item -}}
  {{- end -}}
  {{- range .over -}}
    {{- if hasKey $theirs (get . $by) -}}{{- $result = append $result . -}}{{- end -}}
  {{- end -}}
  {{- dict "value" $result | toJson -}}
{{- else -}}
  {{- dict "value" .over | toJson -}}
{{- end -}}
{{- end -}}
