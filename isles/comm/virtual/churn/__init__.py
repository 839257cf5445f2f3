"""Workers that come and go on the virtual clock: the same `Membership` and `Member` as between real processes.

`meeting`      the lighthouse, and what becomes of a trace's joins, deaths, pauses and outages
`company`      a worker's line to it; `gifts`: states on their way between workers
"""
