"""What travels between processes: message types, framing, codec. Pure."""
