"""Fetches a checkpoint from an https or s3 folder to a folder of this node.

`python -m baton.fetch --uri` runs before a pod's own processes. It may be killed at every line: the
next run continues, and the folder appears whole or not at all.

1. Lock the folder's name. One pod of a node fetches; the others wait for it (`checkpoint`).
2. Ask the source which files the checkpoint has (`sources`, `checkpoint_files`).
3. Fetch each file into the partial folder, from where the last try was cut off (`download`).
4. Give the partial folder its name.
"""
