"""Starting a run, and what follows it.

`run`        from a configuration to a run directory, on this machine or as node 0 of several
`backends`   how workers are started as processes; `virtual`: on the simulated clock; `torchrun`: from outside
`agree`      machines of a run meet and mean the same one; `follow`: a machine that is not node 0
"""
