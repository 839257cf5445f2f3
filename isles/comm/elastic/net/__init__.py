"""The engine of elastic worlds' words: `lanes`, one TLS connection; `hub`, what passes words on; `uplink`, an end."""
