"""Workers that come and go on the virtual clock: the same `Lighthouse` and `Company` as between real processes.

`session`      their sessions; `meeting`: what becomes of a trace's joins, deaths, pauses and outages
"""
