"""Runs whose workers come and go, on the virtual clock.

`churned`     real training under a trace of churn, with the lighthouse's own rules
`repeating`   a recorded run done again, from what each of its workers did
"""
