"""The order of steps and evaluations: recorded, planned and followed; and measurements of steps."""
