"""Memory of a configured run (`[memory]`): the plan of its model on its machine, and its execution (`isles.memory`).

`plans`     the machine, the model's profile, the search for a plan, and what a plan cannot be combined with
`in_use`    `PlannedMemory`: the trainer's interface to its plan; the test of a GPU before training
"""
