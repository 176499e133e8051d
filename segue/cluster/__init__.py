"""The wiring: starts the roles, connects them, watches them. The one room that may import all others (and Ray)."""
