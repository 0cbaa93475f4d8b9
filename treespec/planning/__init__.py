"""The planner: selects the drafting sources, the draft depth, and the number of verified nodes."""
