"""The guards. A package, so that test files can share the modules beside them."""
