"""A small kubelet, and a stand-in for KubeRay, on a real API server. Pods' containers are processes
of this machine, in namespaces of their own.

`kernel`, `entry`, `cgroups`, `network`, `api_gate`, `volumes` make what a container lives in, on
`machine`; `environment`, `hosts`, `pod_status` are pure; `probes`, `container`, `container_runs`,
`pod` run one pod; `kubelet` runs all of a namespace. `kuberay` makes pods of RayClusters with the
pure `ray_pods`. `objects` has what tests of pods are made of.

As in reality: an address for each pod, so that all listen on the same ports; a root file system of
each container's own, which is this machine's with what the container writes on top, and empty
`/tmp` and `/run`; users and groups of the security context; cgroups: a container ends whole.

Not as in reality: image names are not looked at (every container has the project's virtual
environment first on PATH and the repository on PYTHONPATH); pods share one process and one IPC
namespace, so that a container's first process is not its number 1; a Service's name resolves to
its pods' addresses, so that its ports have to be its pods' ports; resources, taints and affinity
are not looked at, node selectors are.
"""
