"""The operator.

What talks to an API server knows nothing of Baton: `connection` (the one module that imports a
Kubernetes client), `kube` and `watch_stream` (verbs), `objects`, `errors`; `informer`, on `cache`;
`workqueue` and `workers`; `election`, on `candidate`; `events`, on `event_series`. What
knows Baton is built on it.
"""
