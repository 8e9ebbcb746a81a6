"""The recipes that ship with keepmtp, one YAML file each."""
