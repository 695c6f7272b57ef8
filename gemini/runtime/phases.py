"""What a step is doing, as traces and timelines name it."""

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
