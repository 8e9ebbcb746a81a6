"""A recipe found under a budget: units, their errors, and the plans that are measured."""
