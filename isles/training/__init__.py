"""A run of a configuration: what its workers do, and what it leaves on disk.

`config`       what a user may set
`kinds`        the kinds of worlds, chosen from a configuration: fixed, elastic, swarm, clusters
`worker`       what each worker does, and its deadlines; `loop`: steps until the last one, and their seconds
`trainer`      the trainer of replicas and stages
`step`         text to batches to gradients; `stage_runner`: the same where the model lies in stages
`optimizer`    the method around the inner optimizer; `memory`: under a plan of memory
`setup`        a worker's start: cores, expected seconds of a round; `interrupts`: signals
`records`      checkpoints, metrics, summaries
`elastic`      runs whose workers come and go; `swarm`, `clusters`: those of stages; `simulated_churn`: in virtual time
`lighthouse`   the process that serves such runs
`scoring`      multiple choice over a file
"""
