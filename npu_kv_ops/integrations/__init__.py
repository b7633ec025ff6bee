"""Connections to serving engines. Importing this package imports none of them."""
