"""Going on from a checkpoint with others than wrote it: its states made into those of other workers, in the same place.

`prepare`    which checkpoint, and whether its states must be made others: as the kind of the run's world says
`replicas`   another number of replicas: means      `stages`   replicas cut into other stages: by name
`clusters`   clusters whose nodes came and went: those who were left
"""
