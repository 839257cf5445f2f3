"""Runs whose stages are served by a swarm of peers (`pipeline.routing = "swarm"`, `isles.pipeline.swarm`).

`trainer`      `SwarmTrainer`: the trainer of one peer; `step`: its `StepRunner`, from microbatches to gradients

Over a lighthouse, also for runs in clusters (`isles.training.clusters`):

`peering`      takes part in a run from its start to its end; `isles swarm peer` calls it
`seated`       what a peer has in its member, whatever it serves, and `ElasticSwarmTrainer`, a swarm's trainer there
`keeping`      the lighthouse
"""
