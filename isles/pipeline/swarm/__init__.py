"""SWARM (Ryabinin et al. 2023, arXiv 2301.11913): stages served by peers that come and go; every microbatch chooses its
next peer as it travels.

Nobody leads: peers tell each other everything by messages, agree among all who are left, and only then take a step.

A step:

`swarm`        `Swarm`: microbatches run, all settle what came of it, then it counts; the guarantee under losses
`delayed`      the same with a step's gradients summed behind the next step; `own`: with an outer method
`peer`         `SwarmPeer`: one peer's loop over messages; `stage_work`: forward and backward of one microbatch
`balancer`     which peer gets the next microbatch
`ledger`        what was counted where, and what a step still lacks after a loss
`reduction`    the sum of a stage's gradients over its peers

Who is in it:

`agreement`    all who are left agree on who that is, and on what each of them says
`placement`  who serves which stage; `rebalancer`: who moves
`entering`     how a peer comes; `gifts`: the state that it gets; `mending`: a stage that has lost all peers
`inbox`         messages sorted by the epoch that they belong to

Around it:

`roster`       the peers of a stage as replicas of an outer method; `messages`: its collectives by messages
`gathering`    the whole model at one peer; `judging`: its loss
`forecast`     how long a step takes, played through beforehand
"""
