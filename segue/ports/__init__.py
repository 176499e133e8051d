"""The protocols between roles: what they may say to each other, and nothing about how either side does its work."""
