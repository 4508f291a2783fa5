"""The operator. What talks to an API server (`errors`, `objects`, `kube`, `watch_stream`, `cache`,
`informer`, `backoff`, `workqueue`, `election`, `events`) knows nothing of Baton; what knows Baton
is built on it. A Kubernetes client may be imported in `kube` alone.
"""
