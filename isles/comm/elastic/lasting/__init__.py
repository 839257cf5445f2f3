"""What must survive a lighthouse, without the disk that it is on: that is `journal`.

`journalled`  a state machine whose lasting state is changed by a journal's entries alone
`register`    the lasting state of `membership`
"""
