"""The operator.

`kit` talks to an API server and knows nothing of Baton: `connection` (the one module that imports a
Kubernetes client), `kube` and `watch_stream` (verbs), `objects`, `errors`, `informer`, `workqueue`,
`election`, `events`. What knows Baton is built on it.
"""
