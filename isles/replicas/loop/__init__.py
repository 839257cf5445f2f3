"""The outer loop: snapshot, receive, encode and send, land. It knows no method."""
