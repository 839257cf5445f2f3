"""Memory of a configured run (`[memory]`): a plan of its model on its machine, and that plan at work (`isles.memory`).

`plans`     the machine, the model's profile, the search for a plan, and what a plan cannot be combined with
`in_use`    `PlannedMemory`: what a trainer asks of its plan
"""
