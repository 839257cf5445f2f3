"""Starting a run, and what follows it.

`run`          from a configuration to a run directory, on this machine or as node 0 of several
`starting`     the table of how workers of each backend are started: `processes`, `virtual`; `torchrun`: from outside
`agree`        machines of a run meet and mean the same one; `follow`: a machine that is not node 0
`server`       the process that workers are forked from
`interrupts`   what Ctrl-C and SIGTERM do
"""
