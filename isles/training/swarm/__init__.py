"""Runs whose stages are served by a swarm of peers (`pipeline.routing = "swarm"`, `isles.pipeline.swarm`).

`trainer`   `SwarmTrainer`: the trainer of one peer; `ElasticSwarmTrainer`: the same in a member of a lighthouse's run
`step`      its `StepRunner`, from microbatches to gradients
`connect`   one peer in a lighthouse's run, from joining to its end; `isles swarm peer` calls it
"""
