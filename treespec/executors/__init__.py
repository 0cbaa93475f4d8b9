"""The interface of executors, which run rounds for the engine, and the executor that the host drives."""
