"""The backbone, one decoder layer at a time. `backbone.py` is the loop over layers."""
