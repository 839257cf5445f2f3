"""What peers that come and go have in common, in swarms and in clusters.

`agreement`  all who are left agree on who that is, and on a vote of each
`inbox`      a peer's messages, by epoch; how a peer joins others that are at work
`transport`  collectives over these messages
"""
