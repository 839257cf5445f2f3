"""A run of whole replicas whose workers come and go, on top of `isles.comm.elastic`.

Before the run:

`terms`       which configurations can be such a run, and the lighthouse's rules of one
`charter`     what a lighthouse knows of its run, read by another process (`drawing_up`), so that it loads no torch

A worker:

`part`        takes part in a run from its start to its end, as one worker or as an island; `isles join` calls it
`entering`    certificate, session, configuration, text and seat
`beginning`   with whose state it begins, and with which round
`joining`     `Participant`: its rounds, and its end
`acts`        what the workers of one seat do together; `island`: those that follow the one with the seat
`states`      whole states as files, for joiners; `means`: the means of single rounds, for who missed them

The lighthouse:

`lighthouse`  `Keeper`: a run from its start to its end; `keeping`: what it shares with the keepers of swarms
`kept`        states on its disk; `averaging`: the mean of the models, without torch; `refused`: who refused whom
`stand`       where it stood, for `isles resume`; `figures`: its summary

On the virtual clock:

`churned`     the same workers under a trace of churn; `repeating`: a recorded run done again (`script`)
"""
