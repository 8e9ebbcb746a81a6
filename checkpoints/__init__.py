"""A CHECKPOINT on disk or on the Hub: headers, stored forms, values, identity. No decision is taken
here.
"""
