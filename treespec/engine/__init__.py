"""The engine: schedules requests and runs rounds of them, driven by the host."""
