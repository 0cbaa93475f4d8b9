"""The planner: which sources draft, how deep, and how many nodes the target verifies."""
