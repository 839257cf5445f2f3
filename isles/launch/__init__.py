"""How worker processes start, on this machine and on others, and how machines find each other. Handles no tensors.

`workers`     a fixed world's worker processes; `processes`: this machine's; `preload`: what they are forked with
`worker`      a worker's side: join the world, work, follow the launcher
`rendezvous`  how launchers of several machines meet; `admission`: whom node 0 admits; `nodes`: the machines then
`link`        messages between two launchers; `relay`: what launchers pass on during a run
`probe`       ports, round trip and rates to another machine
"""
