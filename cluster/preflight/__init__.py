"""Whether a machine, or a pod of it, can serve: what is wrong is told with what mends it.

python -m cluster.preflight. Reads /proc, /sys and limits, changes nothing; two processes that it
starts hand KV over as workers do. May import what workers import; never Ray.
"""
