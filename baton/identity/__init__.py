"""Who a process is to the others of its cluster: a router, a worker or an operator.

An operator is whoever runs the cluster: `baton`, the supervisor, Kubernetes' operator. A process
holds its own role's private key alone, and the public keys of all roles. All are derived from one
root, which only the operator keeps.

A folder of identities has a folder for each role, of which a process needs its own alone:

    router/role.key     the role's name and its private key
    router/roles.pub    a line for each public key: the role's name and the key
    worker/...
    operator/...

Files that change are read again. A role may have several public keys, so that a cluster goes from
one root to another without a restart: first everyone gets the public keys of both, then their
private keys of the new one, then its public keys alone.

A signature names its purpose, and covers a nonce of whoever checks it or the bytes and the time of
one call. So nothing that crosses the wire can be used again.
"""
