"""What was measured or found, as values: the ground on which every judge of a checkpoint stands."""
