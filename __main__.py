"""`python -m keepmtp`, which is what torchrun starts on each device."""

from .cli.main import main

main()
