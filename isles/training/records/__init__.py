"""The files of a run.

`rundir`       the run directory: its files' names, a new run's claim on it, the lock for one run at a time
`writer`       writes all that workers report, in one process; `events`: valid reports; `loggers`: live tools
`checkpoint`   checkpoints; `reshard`: resuming one with other workers or stages
`shard`        states and models in safetensors files, checked for values that are not finite; `checksums`
`saved_run`    reads a finished run; `summary`: its results
`timeline`     when a worker computed, waited and exchanged; `replica_spread`: the distance between replicas
`tokens`       the credentials of a run on several machines
"""
