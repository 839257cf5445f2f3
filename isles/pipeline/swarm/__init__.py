"""SWARM (Ryabinin et al. 2023, arXiv 2301.11913): stages served by peers that come and go; every microbatch chooses its
next peer as it travels.

Nobody leads: peers tell each other everything by letters, agree among all who are left, and only then take a step.

A step:

`swarm`        `Swarm`: microbatches run, all settle what came of it, then it counts; the guarantee under losses
`delayed`      the same with a step's gradients summed behind the next step; `own`: with an outer method
`peer`         `SwarmPeer`: one peer's loop over letters; `stage_work`: forward and backward of one microbatch
`balancer`     which peer gets the next microbatch
`books`        what was counted where, and what a step still lacks after a loss
`reduction`    the sum of a stage's gradients over its peers

Who is in it:

`agreement`    all who are left agree on who that is, and on what each of them says
`arrangement`  who serves which stage; `rebalancer`: who moves
`entering`     how a peer comes; `gifts`: the state that it gets; `mending`: a stage that has lost all peers
`post`         letters sorted by the turn that they belong to

Around it:

`roster`       the peers of a stage as replicas of an outer method; `letters`: its collectives by letters
`gathering`    the whole model at one peer; `judging`: its loss
`forecast`     how long a step takes, played through beforehand
"""
