"""The operator.

- `kit` talks to an API server and knows nothing of Baton; `manifests` writes objects.
- `controller` is the process. `cluster_reconciler` is one look at one ServingCluster.
- What is seen: `caches`, `pod`, `fleet_watch` with `fleet`; all of it in `view`.
- What is decided: `units`, `rollout` (both pure), `planning`.
- What is done: `pools`, `kuberay`, `supervision`, `companions`.
- What is said: `status`, `operator_metrics`.
"""
