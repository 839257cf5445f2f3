"""Memory of a configured run (`[memory]`): a plan of its model on its machine, and that plan at work (`isles.memory`).

`planned`      the machine, the model's profile and the search for a plan; `stages`: the profile of a pipeline's stage
`refused`      what a plan cannot be combined with
`at_work`      `PlannedMemory`: what a trainer asks of its plan
`trial`        a small model run twice, so that a GPU whose copies would change bits is found out first
"""
