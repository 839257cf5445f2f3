"""Worlds that change: workers join, leave, die and come back while the others train.

`cells`       which data a worker reads in a round of a view; `account`: what of it is owed after a loss
`ballot`      when a round of an all-reduce method may land, and what a worker does until then
`membership`  who is in which round: calls in, orders out; no clock and no sockets. `member`: a worker's side of it
`messages`    what they say to each other, and its form as JSON; `journal`: the lighthouse's memory on disk
"""
