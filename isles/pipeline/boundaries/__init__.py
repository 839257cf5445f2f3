"""What crosses between two stages.

`base`     a boundary: encode at the sender, decode at the receiver
`names`    the values of `pipeline.boundary.kind`, read without torch
`scheme`   what each of them makes of a model: plain, its largest entries, coordinates in a subspace
`learned`  learned layers at both ends
"""
