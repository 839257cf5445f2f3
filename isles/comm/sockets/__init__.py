"""Connections between machines, for fixed and elastic worlds alike: one loop, one listener, one proof of the token.

`loop`        the thread in which this process's connections are read and written
`listener`    a listening socket that is safe against strangers; whether one machine reaches another, and how fast
`proof`       a client proves inside TLS 1.3 that it knows the token; `dial`
`connection`  messages in two lanes, framed and measured before they are buffered; signs of life; why a connection is
              lost, in words
"""
