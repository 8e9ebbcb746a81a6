"""The command line: a file for each verb. `main.py` has the app, `pipeline.py` the whole program on one screen."""
