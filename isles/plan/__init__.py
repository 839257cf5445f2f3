"""The plan of a run, made before anything is started or written: memory, exchanges, bytes and time of its workers.

`run_plan`      `plan_run`, which `isles train --dry-run` prints; `record`: its result, the same for all kinds of worlds
`replicas`      replicas, islands, and stages (`pipelines`, `pipeline_steps`); `peers`: swarms
`sketch`        the run's workers around a model without numbers; `computing`: its FLOPs and seconds
`memory_fit`    whether a worker fits its machine; `prices`: a run priced as a larger model
`question`      the question of `isles plan methods` and `isles plan splits`; `methods`, `splits`: their answers
`replay`        exchanges replayed over the links; `worker_classes`: a few workers that represent many alike ones
"""
