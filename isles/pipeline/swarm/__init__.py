"""SWARM (Ryabinin et al. 2023, arXiv 2301.11913): stages served by peers that join and leave; each peer chooses the
next peer of a microbatch.

There is no leader: peers exchange messages, the remaining ones agree (`isles.pipeline.peers`), then take a step.

`swarm`            `Swarm`: a step from its microbatches to its gradient; the guarantee under losses
`delayed`          the same with a step's gradients summed during the next step; `outer`: with an outer method
`peer`             `SwarmPeer`: one peer's loop over messages, forward and backward of one microbatch
`balancer`         which peer gets the next microbatch
`ledger`           which microbatches each peer has counted, and the plan that repairs a step after a loss
`placement`        which stage each peer serves, and which peer moves
`stage_recovery`   how a joining peer gets its state; rebuilding a stage that has lost all of its peers
`evaluation`       the validation loss, and gathering the model at one peer
`forecast`         the duration of a step, simulated beforehand
"""
