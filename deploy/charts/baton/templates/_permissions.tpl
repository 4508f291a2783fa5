{{- /* What the operator does where it looks after ServingClusters. tests/deploy/chart/permissions.py
says what for, and the tests hold the code to it. */ -}}
{{- define "baton.permissions" -}}
- apiGroups: [baton.dev]
  resources: [servingclusters]
  verbs: [list, watch, patch]
- apiGroups: [baton.dev]
  resources: [servingclusters/status, workerpools/status]
  verbs: [patch]
- apiGroups: [baton.dev]
  resources: [servingclusters/finalizers]
  verbs: [update]
- apiGroups: [baton.dev]
  resources: [workerpools]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [list, watch, create, patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- end -}}

{{- /* What it does with its Lease. */ -}}
{{- define "baton.leasePermissions" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [baton-controller]
  verbs: [get, patch]
{{- end -}}
