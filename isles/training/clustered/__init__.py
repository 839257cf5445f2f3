"""Runs whose clusters train in asynchronous stages and average with each other (`pipeline.routing = "ravnest"`,
`isles.pipeline.ravnest`).

`node`         `ClusterWorker`: one worker, stretch after stretch until the last step
`opening`      how it begins, in a fixed world and where workers come and leave
`stretches`    at which updates a stretch ends; `reading`: which text each cluster reads in it
`holding`      what a worker holds as its place changes; `serving`: a stage with its optimizer, and the text at the root
`meter`        what it reports; `ending`: its share of the summary, and the model
`cuts`         where each cluster cuts the model; `describing`: what this machine offers to one
`dry`          the plan of such a run
`churned`      a run whose nodes come and go on the virtual clock

Over a lighthouse: `peering`, `seated` and `keeping`, each after the file of that name in `isles.training.swarmed`.
"""
