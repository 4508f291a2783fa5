"""The operator. Its folders, lowest first:

- `kit` talks to an API server and knows nothing of Baton.
- `rollout` decides how a change is rolled out; `manifests` writes objects. Both are pure.
- `observed` is what a pass sees of a cluster; `status` is what it says of it.
- `reconcile` does what is lacking: `cluster_reconciler` is one pass over one ServingCluster.
- `controller` is the process.
"""
