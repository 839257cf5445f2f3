"""Worlds whose workers join, leave, die and return while the others train.

A `Lighthouse` process decides which members take part in which round; each worker follows through its
`MembershipClient`. The decisions are made by state machines without clock or socket, which tests and the virtual clock
drive as well. Reading order:

`coordinator`        the lighthouse's: which members are in which round; calls in, `effects` out; `coordinator_state`:
                     what must survive a restart, as entries of a journal
`member`             a worker's side of it
`data_ledger`        which data a worker reads in a round of a view, and what must be read again after a loss
`round_commit`       when a round of an all-reduce method lands; `late_shares`: rounds that do not wait for the slowest
`swarm_coordinator`  in place of `coordinator`, for worlds whose workers serve stages of a pipeline

Around them:

`messages`           between lighthouse and workers, and their JSON form, with `View`; `keys`: addresses and MACs
`session`            what carries the messages; `tls_session` and `hub`: between processes; `simulated`: in virtual time
`lighthouse`         drives a coordinator, keeps its journal; `failure_detector`: who is connected and responsive
`requests`, `client` a worker's requests to the lighthouse, and the notifications that it gets
`rounds`             what a member does in each round, and with which partners; a single worker or an island
`p2p`                tensors between workers, over connections of their own or relayed ones
`state_transfer`     files that one member fetches from another
`run_log`            the record of a run's rounds on disk

Terms:

member      a worker's number in a run, never used twice: a process that joins again gets another one
round       `sync_every` inner steps and the exchange at their end; all workers count them alike
view        the members that take part from some round on, and how many inner steps each takes in a round
data slice  what one member reads in one round of a view; `backlog`: slices of lost workers that others read instead
proposal    a view that its members have still to promise
attempt     one try at an exchange that all members land together; it is retried among those who are left
decision    the lighthouse's, on an attempt: land, or retry among these members
grace       seconds that a round waits for more members once a quorum has delivered
"""
