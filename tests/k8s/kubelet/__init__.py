"""A small kubelet, and a stand-in for KubeRay, on a real API server. Pods' containers are processes
of this machine, in namespaces of their own.

`kernel`, `entry`, `cgroups`, `network`, `api_gate`, `volumes` make what a container lives in, on
`machine`; `environment`, `hosts`, `pod_status` are pure; `probes`, `container`, `container_runs`,
`pod` run one pod; `kubelet` runs all of a namespace. `kuberay` makes pods of RayClusters with the
pure `ray_pods`. `objects` has what tests of pods are made of.

As in reality: an address for each pod, so that all listen on the same ports; a root file system of
each container's own, which is its image's with what the container writes on top, and empty
`/tmp` and `/run`; users and groups of the security context; cgroups: a container ends whole.

Not as in reality: but for images that a test has built, files are this machine's (the project's
virtual environment is first on PATH, the repository on PYTHONPATH); pods share one process and one
IPC namespace, so that a container's first process is not its number 1; a Service's name resolves to
its pods' addresses, so that its ports have to be its pods' ports; resources, taints and affinity
are not looked at, node selectors are.
"""
