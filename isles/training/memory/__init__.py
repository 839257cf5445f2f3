"""Memory of a configured run (`[memory]`): a plan of its model on its machine, and that plan at work (`isles.memory`).

`plans`   the machine, the model's profile, the search for a plan, and its optimizer; what it cannot be combined with
`in_use`  what a trainer asks of its memory, with a plan and without
"""
