"""Fetches a checkpoint that lies in an https or s3 folder to a folder of this node.

`python -m baton.fetch` runs before a pod's own processes. It may be killed at every line: what came
is gone on with by the next one, and the folder appears whole or not at all.

1. Lock the folder's name: of several pods of a node one fetches, the others wait for it.
2. Ask the source what a checkpoint's files are (`checkpoint_files`).
3. Fetch each into the partial folder, going on where the last try was cut off (`download`).
4. Give the partial folder its name (`node_cache`).
"""
