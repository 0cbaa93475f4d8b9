"""The SSM group: small speculative models that grow one token tree in lockstep."""
