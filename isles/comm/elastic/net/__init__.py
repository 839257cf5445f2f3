"""The engine of elastic worlds' words: `words`, their form; `hub`, what passes them on; `uplink`, an end."""
