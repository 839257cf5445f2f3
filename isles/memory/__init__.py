"""A model larger than the device: what of each block stays there, is swapped or recomputed, planned and then run
(KARMA, arXiv 2008.11421; AutoHete, arXiv 2503.01890).

Planned, without torch:

`costs`         what each choice for a block takes on the device, the host, the disk and every lane
`flow`          the bytes, weights and lanes of a step, which `lanes` simulates and `runner` does
`search`        the fastest plan that fits; `plan`: a plan as data

Measured:

`profile`       what a model's blocks take, without the memory that a run would need
`measurement`   what this machine can do

Executed: losses, weights and optimizer states keep every bit of the run without a plan.

`optimizer`     `Managed`: the optimizer around the model's own
`runner`        forward and backward passes under the plan; `units`: the blocks of a model
`activations`   swapped to the host or recomputed
`parameters`    weights that come for a pass, gradients, updates, states shared among workers
`disk`          the tier behind the memory
`meter`         bytes counted; `engines`: who moves them beside the computation
"""
