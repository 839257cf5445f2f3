"""The lighthouse of a run, on top of `isles.membership.lighthouse`: its directory, its records, and its model.

`server`  `LighthouseServer`: what all lighthouses do; `rounds`: of replicas; `peers`: of swarms and clusters
`mean`    the mean of the workers' models, without torch
"""
