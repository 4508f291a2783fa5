"""`kubectl baton`: the `baton` command line for a ServingCluster, found and reached by kubectl.

May import the standard library and `baton`. Whatever kubectl knows of clusters, contexts and
credentials is left to kubectl.
"""
