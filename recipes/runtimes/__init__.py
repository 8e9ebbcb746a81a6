"""What servers call things, and which of their versions do so, as data."""
