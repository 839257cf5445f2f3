"""Starting runs.

`run`        from a configuration to a run directory, on this machine or as node 0 of several
`backends`   starts workers as processes; `virtual`: on the simulated clock; `torchrun`: in torchrun's processes
`agree`      the machines of a run connect and compare their settings; `follow`: a machine that is not node 0
"""
