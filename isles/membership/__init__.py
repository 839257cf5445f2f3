"""Worlds that change: workers join, leave, die and come back while the others train.

A `Lighthouse` process decides who takes part in which round; each worker follows through its `MembershipClient`. What
they decide by are state machines without a clock or a socket, so that tests and the virtual clock drive the same code.

State machines, in the order in which they are best read:

`membership`  the lighthouse's: who is in which round; calls in, orders (`orders`) out. `calls`: which call a message is
`member`      a worker's side of it
`cells`       which data a worker reads in a round of a view; `ledger`: what of it is owed after a loss
`ballot`      when a round of an all-reduce method may land, and what a worker does until then; `ballots`: all open ones
`quorum`      rounds whose mean does not wait for the slowest
`swarm`       worlds whose workers serve stages of a pipeline, in place of `membership`
`lasting`     what must survive a restart of the lighthouse; `journal`: its memory on disk

What runs them, and carries data:

`messages`    what lighthouse and workers say to each other, and its form as JSON; `keys`: addresses and signatures
`control`     what the control plane needs of whatever carries it; `session`: that between processes, and `net` under it
`p2p`         connections of a pair: who dials, what is sent and taken; `links`: who is reached, what is relayed
`lighthouse`  the lighthouse's process; `guards`: what it and the workers do not take from others
`client`     a worker's line to the lighthouse; `line`: what its training thread asks of it
`transport`   tensors between workers, over `p2p`
`rounds`      what a member does in each round, and with whom
`gifts`       files that one member hands to another
`record`      what a run leaves on disk about its rounds

Words:

member        a worker's number in a run, never used twice: a process that joins again gets another one
round       `sync_every` inner steps and the exchange at their end; all workers count them alike
view        the members that take part from some round on, and how many inner steps each takes in a round
cell        what one member reads in one round of a view; `backlog`: cells of lost workers that others read instead
proposal    a view that its members have still to promise
attempt     one try at an exchange that all members land together; it is repeated among those who are left
word        the lighthouse's decision on an attempt: land, or try again among these members
grace       seconds that a round waits for more members once a quorum has delivered
gift        a file that one member hands to another: a state to begin with, the final model
client     the lighthouse and the other members, as one worker knows them
"""
