"""What a run leaves on disk.

`rundir`          the run directory: names of its files, a new run's claim on it, one run at a time
`writer`          writes all that workers report, in one process; `events`: what they may report; `loggers`: live tools
`checkpoint`      checkpoints; `shard`: one worker's file; `checksums`: whether a file is intact
`reshard`         going on from a checkpoint with other workers or stages
`saved_run`       a finished run read back; `summary`: its result
`timeline`        when a worker computed, waited and exchanged; `replica_spread`: how far replicas are apart
`tokens`          the secret of a run on several machines
"""
