"""Transports, groups, codecs: everything that crosses between workers goes through here, and is counted here.

`transport`    what a transport must be (a Protocol); `gloo` and `virtual` are two, `isles.membership.p2p` has a third
`mesh`         the ranks of a run on axes, and the world of a process, such as torchrun's; `layout`: the same as data
`environment`  how torchrun, srun and mpirun describe it
`group`        ranks that exchange; `tags`, `call`: addresses of messages and operations; `traffic`: counts
`collectives`  means, gathering and ragged messages, written once for all transports
`codecs`       the form of a vector on the wire
`roster`       which workers take part in which round, where they may be lost or come and go
`errors`       what can go wrong between workers; `trust`: whether a share can be used
`stopping`     how all workers stop after the same step
`sockets`      connections between machines; `credentials`: certificate, secret, token; `tcp`: what Linux knows of them
"""
