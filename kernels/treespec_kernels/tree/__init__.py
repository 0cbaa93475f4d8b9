"""Token trees on the device: growth, merge, selection and verification."""
