"""Ravnest (Menon et al. 2024, arXiv 2401.01728): clusters that each hold a copy of the model in asynchronous stages,
and average with each other from time to time, though they are cut at different blocks.

`stage`        one node of a cluster: its loop over microbatches, whose updates do not wait for each other
`averaging`    who averages which parameters with whom, segment by segment at the same time
`assignment`   who serves which stage of which cluster, where nodes are lost, come and leave
`agreement`    which clusters are whole, agreed on by all who are left; how a node joins them
"""
