"""Runs whose clusters train in asynchronous stages and average with each other (`pipeline.routing = "ravnest"`,
`isles.pipeline.ravnest`).

`node`           `ClusterWorker`: one worker, whose step is a segment of updates (`isles.training.loop`)
`stage_server`   where clusters cut the model, what a worker holds of it, and this machine's memory and speed
`member`         the same in a member of a lighthouse's run, after `isles.training.swarm.connect`
"""
