"""Runs whose clusters train in asynchronous stages and average with each other (`pipeline.routing = "ravnest"`,
`isles.pipeline.ravnest`).

`node`         `ClusterWorker`: one worker, whose step is a stretch of updates (`isles.training.loop`)
`opening`      how it begins, in a fixed world and where workers come and leave
`server`      what a worker holds as its place changes: a stage with its optimizer, and the text at the root
`cuts`         where each cluster cuts the model; `describing`: what this machine offers to one

Over a lighthouse: `peering`, after `peering` and `assigned` in `isles.training.swarm`.
"""
