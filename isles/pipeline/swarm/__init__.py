"""SWARM (Ryabinin et al. 2023, arXiv 2301.11913): stages served by peers that come and go; every microbatch chooses its
next peer as it travels.

There is no leader: peers send each other messages, all who are left agree (`isles.pipeline.peers`), then take a step.

`swarm`            `Swarm`: a step from its microbatches to its gradient; the guarantee under losses
`delayed`          the same with a step's gradients summed behind the next step; `outer`: with an outer method
`peer`             `SwarmPeer`: one peer's loop over messages, forward and backward of one microbatch
`balancer`         which peer gets the next microbatch
`ledger`           what was counted where, and the plan that repairs a step after a loss
`placement`        who serves which stage, and who moves
`stage_recovery`   the state that a joining peer gets; a stage that has lost all of its peers
`evaluation`       the loss of the weights, and the whole model at one peer
`forecast`         how long a step takes, simulated beforehand
"""
