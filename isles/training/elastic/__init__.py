"""A run of whole replicas whose workers come and go, on top of `isles.membership`.

`terms`       which configurations can be such a run, and the lighthouse's rules of one
`figures`     what its summary says; `given`: under which names states and models are given

A worker:

`part`        takes part in a run from its start to its end, as one worker or as an island; `isles join` calls it
`entering`    certificate, session, configuration, text and member
`beginning`   with whose state it begins, and with which round
`joining`     `Participant`: its rounds, and its end
`worker`      one worker of a member: it obeys decision after decision
`states`      whole states as files, for joiners; `catch_up_log`: the means of single rounds, for who missed them

`lighthouse`  the other side: who keeps the run
`churn`       the same workers on the virtual clock
"""
