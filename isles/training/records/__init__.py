"""What a run leaves on disk.

`rundir`       the run directory: its files' names, a new run's claim on it; `lock`: one run at a time
`writer`       writes all that workers report, in one process; `events`: what they may report; `loggers`: live tools
`checkpoint`   checkpoints; `reshard`: going on from one with other workers or stages
`saved`        a finished run read back; `summary`: what it came to
`tensors`      tensors into files one at a time; `finite`: never such as are not numbers
`timeline`     when a worker computed, waited and exchanged; `spread`: how far replicas are apart
`tokens`       the secret of a run on several machines
"""
