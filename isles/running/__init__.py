"""Starting a run of fixed workers, and what follows it.

`run`       from a configuration to a run directory, on this machine or as node 0 of several; `STARTERS`: the module
            that starts the workers of each `world.backend`
`backends`  backend `distributed`: processes; `virtual`: threads on the virtual clock
`torchrun`  workers that torchrun has started
`agree`     machines of a run meet, and check that all mean the same run; `follow`: a machine that is not node 0
"""
