"""THE COMMAND: one file a verb. `main.py` has the app, `pipeline.py` the whole line on one screen."""
