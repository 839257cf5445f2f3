"""Worlds that change: workers join, leave, die and come back while the others train.

`cells`       which data a worker reads in a round of a view; `account`: what of it is owed after a loss
`ballot`      when a round of an all-reduce method may land, and what a worker does until then
`membership`  who is in which round: calls in, orders out; no clock and no sockets. `member`: a worker's side of it
`messages`    what they say to each other, and its form as JSON
`lasting`     what must survive the lighthouse; `journal`: its memory on disk

Words:

seat        a worker's number in a run, never used twice: a process that joins again gets another one
round       `sync_every` inner steps and the exchange at their end; one clock for all
view        the seats of the rounds from one on, and how many inner steps each takes in a round
cell        what one seat reads in one round of a view; `owed`: cells of the lost that others read instead
proposal    a view that its members have still to promise
attempt     of an exchange that all land together; it is repeated among those who are left
word        the lighthouse's, on an attempt: land, or again among these
grace       seconds in which a round waits for more than its quorum
gift        a file that one seat hands to another: a state to begin with, the one model
company     the lighthouse and the other seats, as one worker knows them
"""
