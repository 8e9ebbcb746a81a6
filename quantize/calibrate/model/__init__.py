"""The model as it is calibrated: its skeleton, its experts and attention, its states."""
