"""Ravnest (Menon et al. 2024, arXiv 2401.01728): clusters that each hold a copy of the model in asynchronous stages,
and average with each other from time to time, though they are cut at different blocks.

`stage`        one node of a cluster: its loop over microbatches, with asynchronous updates
`averaging`    the averages between clusters, all segments in parallel
`assignment`   which node serves which stage of which cluster, as nodes are lost, join and leave
`agreement`    the agreement of the remaining nodes on the intact clusters; how a node joins them
"""
