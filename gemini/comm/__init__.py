"""The processes that work together: who they are, what they say to each other, who does not come."""
