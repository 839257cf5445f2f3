"""How worker processes start, on this machine and on others, and how machines find each other. Handles no tensors.

`workers`     a fixed world's worker processes; `preload`: modules that the fork server loads
`worker`      a worker's side: join the world, work, follow the launcher
`rendezvous`  how launchers of several machines meet, and whom node 0 admits; `nodes`: the machines then
`handles`     connections of a launcher to its workers and to the other launchers
`probe`       ports, round trip and rates to another machine
"""
