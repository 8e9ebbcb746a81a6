"""The command line: a file for each verb. `main.py` has the app."""
