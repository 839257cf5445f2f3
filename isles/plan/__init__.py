"""The plan of a run, made before anything is started or written: memory, exchanges, bytes and time of its workers.

`run_plan`      `plan_run`, which `isles train --dry-run` prints, and runs priced as larger models; `record`: its result
`replicas`      replicas, islands, and stages (`pipeline_steps`); `peers`: swarms
`sketch`        the run's workers around a model without numbers
`memory_fit`    operations and seconds of a step; whether a worker fits its machine
`question`      the question of `isles plan methods` and `isles plan splits`; `methods`, `splits`: their answers
`replay`        exchanges replayed over the links; `worker_classes`: a few workers that represent many alike ones
"""
