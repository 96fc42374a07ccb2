"""What the shells need from the world, as Protocols; the adapters live in packages beside it."""
