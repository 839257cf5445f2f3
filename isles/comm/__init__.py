"""Transports, groups, codecs: everything that crosses between workers goes through here, and is counted here."""
