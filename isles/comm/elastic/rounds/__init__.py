"""What a member does in each round, and with whom: decided once (`leader`), obeyed by all of its workers (`decision`).

`roster`      who takes part in an exchange, for the outer loop; `island`: the workers of a member, where it has several
"""
