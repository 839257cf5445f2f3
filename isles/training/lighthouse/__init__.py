"""The lighthouse of a run, on top of `isles.membership.lighthouse`: its directory, its records, and its model.

`keeper`      `RoundsLighthouseServer`: a run from its start to its end; `keeping`: what it shares with the keepers of
swarms `averaging`   the mean of the models, without torch; `refused`: who refused whom `stand`       where it stood,
for `isles resume`
"""
