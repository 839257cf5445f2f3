"""Runs whose clusters train in asynchronous stages and average with each other (`pipeline.routing = "ravnest"`,
`isles.pipeline.ravnest`).

`node`           `ClusterWorker`: one worker, whose step is a segment of updates (`isles.training.loop`)
`stage_server`   what a worker holds as its assignment changes: a stage with its optimizer, and the text at the root
`cuts`           where each cluster cuts the model, and what this machine offers to one
`member`         the same in a member of a lighthouse's run, after `isles.training.swarm.connect`
"""
