"""Running the work of a round: in this process, or in actors on Ray."""
