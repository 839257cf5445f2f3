"""A run of whole replicas whose workers come and go, on top of `isles.membership`.

`connect`     how a worker joins a run: certificate, session, configuration, data, member id
`leader`      `Participant`: decides round after round what its member does, until the end of the run
`worker`      `ElasticWorker`: one worker of a member, which carries out those decisions
`states`      whole states as files for joiners, and the means of single rounds for members that missed them
`support`     which configurations can be such a run, and the lighthouse's rules of one
`metrics`     what the summary says of joins, losses and repeated work
`replay`      a finished run again, from its record; on the virtual clock: `isles.training.simulated_churn`

`isles.training.lighthouse` is the other side: the process that serves the run.
"""
