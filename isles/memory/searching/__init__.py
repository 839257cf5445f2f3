"""What the search for a plan of memory (`isles.memory.search`) is made of.

`trials`      a question, and every plan that was tried for it: fits, bound, simulated seconds
`counts`      equal units: plans by how many of each choice
`linear`      unequal units: an integer program
"""
