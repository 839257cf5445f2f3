"""Connections between machines, for fixed and elastic worlds alike: one loop, one listener, one proof of the token.

`loop`        the thread in which this process's connections are read and written
`listener`    a listening socket that strangers may do to what they like
`proof`       whoever is let in proves inside TLS 1.3 that it knows the token; `dial`, how one gets there
`connection`  messages in two lanes, and signs of life; `silence`: for how long the other side has said nothing
`frames`      messages, measured before they are kept; `addresses`: as they are written, and whose they are
`lost`        why a connection is of no use, in words
"""
